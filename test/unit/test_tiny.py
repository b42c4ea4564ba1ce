"""Tiny checkpoints keep to the released layout."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CheckpointMaker
from packaging.version import Version
from safetensors.torch import load_file
from transformers import Qwen2TokenizerFast, Qwen3OmniMoeForConditionalGeneration

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.tiny import write_tiny_checkpoint
from qwen3_omni_neuron.tiny.shapes import SHAPES, config_dict
from qwen3_omni_neuron.tiny.tokenizer import ROLES, SPECIAL_TOKENS, write_tokenizer
from qwen3_omni_neuron.tiny.weights import parameter_shapes

FILES = {
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "vocab.json",
    *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)),
}


def test_the_files_are_the_released_ones(checkpoint: Path) -> None:
    assert {file.name for file in checkpoint.iterdir()} == FILES


def test_transformers_loads_it_with_nothing_missing_and_nothing_left_over(
    checkpoint: Path,
) -> None:
    model, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, output_loading_info=True
    )
    assert not any(info.values()), info
    if Version(transformers.__version__) < Version("5"):  # which names experts one by one
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(model.state_dict())


def test_the_index_tells_the_truth(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    total = 0
    for shard in checkpoint.glob("*.safetensors"):
        tensors = load_file(shard)
        assert {n for n, f in index["weight_map"].items() if f == shard.name} == set(tensors)
        total += sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_the_same_seed_gives_the_same_bytes_and_another_others(tmp_path: Path) -> None:
    one, two, other = (
        write_tiny_checkpoint(tmp_path / name, seed=seed)
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    shard = "model-00001-of-00004.safetensors"
    assert (one / shard).read_bytes() != (other / shard).read_bytes()


@pytest.mark.parametrize(("size", "least", "most"), [("tiny", 1e6, 2e6), ("small", 1e8, 3e8)])
def test_sizes(tmp_path: Path, size: str, least: float, most: float) -> None:
    shapes = parameter_shapes(config_dict(SHAPES[size], write_tokenizer(tmp_path), "bfloat16"))
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert least < parameters < most


def test_small_has_the_released_head_sizes(tmp_path: Path) -> None:
    raw = config_dict(SHAPES["small"], write_tokenizer(tmp_path), "bfloat16")
    audio, vision = raw["thinker_config"]["audio_config"], raw["thinker_config"]["vision_config"]
    vocoder = raw["code2wav_config"]
    assert raw["thinker_config"]["text_config"]["head_dim"] == 128
    assert raw["talker_config"]["text_config"]["head_dim"] == 128
    assert raw["talker_config"]["code_predictor_config"]["head_dim"] == 128
    assert audio["d_model"] / audio["encoder_attention_heads"] == 64
    assert vision["hidden_size"] / vision["num_heads"] == 72
    assert vocoder["hidden_size"] / vocoder["num_attention_heads"] == 64
    assert (vocoder["sliding_window"], vocoder["num_quantizers"]) == (72, 16)
    assert (vocoder["upsample_rates"], vocoder["upsampling_ratios"]) == ([8, 5, 4, 3], [2, 2])


def test_no_weight_and_no_bias_is_constant(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert tensor.numel() == 1 or tensor.float().std() > 0.001, name


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_neither_flat_nor_one_hot_and_audio_neither_silent_nor_clipped(
    checkpoint_of_seed: CheckpointMaker, seed: int
) -> None:
    with Qwen3Omni.load(checkpoint_of_seed(seed), dtype="float32", max_concurrency=1) as omni:
        prompt = omni.conversation.prompt([{"role": "user", "content": "Hello there"}])
        logits, _ = omni._pipeline._engines.thinker.prefill(0, prompt)
        result = omni.generate_audio(
            [{"role": "user", "content": "Hello there"}],
            seed=seed,
            thinker_max_new_tokens=4,
            talker_max_new_tokens=30,
        )
    likeliest = logits.softmax(-1).max()
    assert 2 / logits.shape[-1] < likeliest < 0.95
    assert 0.01 < result.audio.std() < 0.4
    assert (abs(result.audio) >= 1).mean() < 0.001


def test_the_tokenizer_has_every_special_token_and_one_token_a_role(
    checkpoint: Path, config: OmniConfig
) -> None:
    tokenizer = Qwen2TokenizerFast.from_pretrained(checkpoint)
    for token in (*SPECIAL_TOKENS, *ROLES):
        assert len(tokenizer.encode(token)) == 1, token
    assert tokenizer.encode("!") == [0], "id 0 is a real token, as released"
    assert tokenizer.encode("user") == [config.user_id]
    assert tokenizer.encode("<|audio_pad|>") == [config.thinker.audio_token_id]
    for text in ("déjà vu, 你好 🙂!\n", "tabs\tand  spaces"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_there_are_three_speakers(config: OmniConfig) -> None:
    assert config.talker is not None
    assert set(config.talker.speaker_ids) == {"chelsie", "ethan", "aiden"}


@pytest.mark.parametrize("wrong", [{"size": "large"}, {"dtype": "int8"}, {"seed": -1}])
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        write_tiny_checkpoint(tmp_path, **wrong)  # type: ignore[arg-type]
