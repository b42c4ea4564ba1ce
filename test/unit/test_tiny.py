"""Tiny checkpoints keep to the released layout."""

import json

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.checkpoint.drawn import draw
from qwen3_omni_neuron.checkpoint.files import Checkpoint, fingerprint
from qwen3_omni_neuron.errors import CheckpointError
from testing.tiny import write_tiny_checkpoint
from testing.tiny.sizes import SIZES, config_dict
from testing.tiny.tokenizer import write_tokenizer
from testing.tiny.weights import parameter_shapes

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


def test_the_files_are_the_released_ones(checkpoint) -> None:
    assert {file.name for file in checkpoint.iterdir()} == FILES


def test_transformers_loads_it_with_nothing_missing_and_nothing_left_over(checkpoint) -> None:
    model, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, output_loading_info=True
    )
    assert not any(info.values()), info
    if Version(transformers.__version__) < Version("5"):  # which names experts one by one
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(model.state_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_drawn_checkpoint_is_the_written_one(tmp_path, dtype) -> None:
    written = write_tiny_checkpoint(tmp_path / "written", seed=5, dtype=dtype)
    drawn = write_tiny_checkpoint(tmp_path / "drawn", seed=5, dtype=dtype, drawn=True)
    assert not list(drawn.glob("*.safetensors*"))
    assert set(Checkpoint(drawn).names) == set(Checkpoint(written).names)
    with Checkpoint(written).reader() as stored, Checkpoint(drawn).reader() as made:
        for name in Checkpoint(written).names:
            one, other = stored.tensor(name), made.tensor(name)
            assert one.dtype == other.dtype and torch.equal(one, other), name


def test_drawn_checkpoints_of_two_seeds_are_two_checkpoints(tmp_path) -> None:
    one, other = (
        write_tiny_checkpoint(tmp_path / str(seed), seed=seed, drawn=True) for seed in (1, 2)
    )
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(write_tiny_checkpoint(tmp_path / "3", 1, drawn=True))


def test_a_broken_file_of_a_drawn_checkpoint_is_named(tmp_path) -> None:
    folder = write_tiny_checkpoint(tmp_path, drawn=True)
    for content in ("", "[]", "{}"):
        (folder / "drawn.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"drawn\.json"):
            Checkpoint(folder)


@pytest.mark.parametrize("size", ["wide", "released"])
def test_a_large_size_has_the_parameters_of_transformers(tmp_path, size) -> None:
    """Names as in the release, shapes from modules without memory, expert by expert or stacked."""
    raw = config_dict(SIZES[size], write_tokenizer(tmp_path), "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig.from_pretrained(tmp_path))
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(raw).values()) == theirs


def test_the_speaking_size_is_that_of_the_checkpoint_that_ships() -> None:
    """Training writes its config.json from this size, with a tokenizer of its own."""
    vocab = json.loads((SPEAKING_CHECKPOINT / "vocab.json").read_text())
    added = json.loads((SPEAKING_CHECKPOINT / "tokenizer_config.json").read_text())
    special = {t["content"]: int(i) for i, t in added["added_tokens_decoder"].items()}
    raw = json.loads((SPEAKING_CHECKPOINT / "config.json").read_text())
    assert config_dict(SIZES["speaking"], {**vocab, **special}, "bfloat16") == raw


def test_a_parameter_filled_in_blocks_has_the_values_of_one_filled_at_once(monkeypatch) -> None:
    at_once, in_blocks = torch.empty(2, 10, 48)
    numbers = 1, 0.0, 1.0, 9
    draw(at_once, "thinker.lm_head.weight", *numbers)
    monkeypatch.setattr("qwen3_omni_neuron.checkpoint.drawn.BLOCK_VALUES", 4 * 48)
    draw(in_blocks, "thinker.lm_head.weight", *numbers)
    assert torch.equal(at_once, in_blocks)
    assert at_once[9].std() < 0.5 * at_once[8].std()
