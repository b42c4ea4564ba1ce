"""Messages to prompts, held against the reference's own processor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2TokenizerFast, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

from conftest import QUESTION_WAV
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.audio_input import load_waveform
from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.conversation import Conversation
from qwen3_omni_neuron.errors import CheckpointError, MessageError

TONE = np.sin(np.arange(9000, dtype=np.float32) / 7)
CLIP = {"type": "audio", "audio": str(QUESTION_WAV)}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "What colour is the sky?"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ],
    "audio": [{"role": "user", "content": [CLIP]}],
    "clips": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "First:"},
                CLIP,
                {"type": "audio", "audio": TONE, "sampling_rate": 16000},
                {"type": "text", "text": "or second?"},
            ],
        }
    ],
    "turns": [
        {"role": "user", "content": [CLIP]},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": ""},
        {"role": "user", "content": "Sure?"},
    ],
}


@pytest.fixture(scope="module")
def conversation(checkpoint: Path, config: OmniConfig) -> Conversation:
    return Conversation(checkpoint, config)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    """The reference's processor without its image half, which would need torchvision."""
    made = Qwen3OmniMoeProcessor.__new__(Qwen3OmniMoeProcessor)
    tokenizer = Qwen2TokenizerFast.from_pretrained(checkpoint)
    made.tokenizer = tokenizer
    made.feature_extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    made.image_processor = made.video_processor = SimpleNamespace(
        merge_size=2, model_input_names=[]
    )
    for name in ("image", "audio", "video"):
        setattr(made, f"{name}_token", getattr(tokenizer, f"{name}_token"))
        token_id = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
        setattr(made, f"{name}_token_id", token_id)
    for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos"):
        setattr(made, f"{name}_token", getattr(tokenizer, f"{name}_token"))
    return made


def of_kind(messages: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [
        item
        for message in messages
        if not isinstance(message["content"], str)
        for item in message["content"]
        if item["type"] == kind
    ]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_are_the_references(conversation: Conversation, processor: Any, name: str) -> None:
    messages = CONVERSATIONS[name]
    prompt = conversation.prompt(messages)
    text = processor.tokenizer.apply_chat_template(
        messages, chat_template=conversation._template, tokenize=False, add_generation_prompt=True
    )
    waveforms = [load_waveform(item, 16000, "clip") for item in of_kind(messages, "audio")]
    theirs = processor(text=text, audio=waveforms or None, return_tensors="pt")
    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    if waveforms:
        masks = theirs["feature_attention_mask"].bool()
        for mel, features, mask in zip(
            prompt.audio_mel, theirs["input_features"], masks, strict=True
        ):
            torch.testing.assert_close(mel, features[:, mask], atol=1e-5, rtol=1e-5)
    else:
        assert prompt.audio_mel == ()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_positions_are_the_references(
    conversation: Conversation, reference: Any, name: str
) -> None:
    prompt = conversation.prompt(CONVERSATIONS[name])
    ids = prompt.token_ids[None]
    lengths = torch.tensor([m.shape[1] for m in prompt.audio_mel]) if prompt.audio_mel else None
    theirs, _ = reference.model.thinker.get_rope_index(
        ids, attention_mask=torch.ones_like(ids), audio_seqlens=lengths
    )
    assert prompt.positions.tolist() == theirs[:, 0].long().tolist()


def test_a_clip_takes_as_many_placeholders_as_the_encoder_makes_rows(
    conversation: Conversation, config: OmniConfig
) -> None:
    prompt = conversation.prompt(CONVERSATIONS["clips"])
    rows = [config.thinker.audio.tokens(m.shape[1]) for m in prompt.audio_mel]
    assert int((prompt.token_ids == config.thinker.audio_token_id).sum()) == sum(rows)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "the conversation is empty"),
        ("Hello", "messages is a str"),
        ({"role": "user", "content": "x"}, "messages is a dict"),
        (["Hello"], r"messages\[0\] is a str"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\] has role 'robot'.*system, user"),
        ([{"content": "x"}], "has role None"),
        ([{"role": "system", "content": "x"}], "no user message"),
        ([{"role": "user"}], "has content of type NoneType"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] is a int"),
        ([{"role": "user", "content": [{"type": "text"}]}], 'text without a "text"'),
        ([{"role": "user", "content": [{"type": "smell"}]}], "has type 'smell'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "can't see yet"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "can't see yet"),
        ([{"role": "user", "content": "<|audio_pad|>"}], "0 audio clips but 1"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "audio", "audio": "x.wav"}]},
            ],
            r"messages\[1\]\.content\[0\] is audio of role assistant",
        ),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_place(
    omni: Qwen3Omni, messages: Any, said: str
) -> None:
    with pytest.raises(MessageError, match=said):
        omni.stream(messages)


@pytest.mark.parametrize("name", ["vocab.json", "preprocessor_config.json"])
def test_a_checkpoint_without_its_text_files_is_refused(
    checkpoint: Path, config: OmniConfig, tmp_path: Path, name: str
) -> None:
    for file in checkpoint.glob("*.*"):
        if file.name != name and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Conversation(tmp_path, config)


def test_the_chat_template_is_found_in_each_of_its_places(
    checkpoint: Path, config: OmniConfig, tmp_path: Path
) -> None:
    for file in checkpoint.glob("*.*"):
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    question = [{"role": "user", "content": "user"}]
    assert Conversation(tmp_path, config).prompt(question).token_ids[0] == config.user_id
    (tmp_path / "chat_template.jinja").unlink()
    assert Conversation(tmp_path, config).prompt(question).token_ids[0] == config.im_start_id
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(CheckpointError, match="no chat template"):
        Conversation(tmp_path, config)
