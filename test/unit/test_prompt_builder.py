"""Messages to prompts, held against the reference's own processor."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Qwen2TokenizerFast, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

from qwen3_omni_neuron.errors import CheckpointError, MessageError, PromptTooLongError
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.pixels import Visual
from qwen3_omni_neuron.prompt.messages import read_messages
from testing.media_cases import CASES, QUESTION_WAV, audio, image, user, video

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
def chat_template(checkpoint) -> str:
    file = checkpoint / "chat_template.json"
    return json.loads(file.read_text(encoding="utf-8"))["chat_template"]


@pytest.fixture(scope="module")
def processor(checkpoint) -> Any:
    """The reference's processor, but for its video processor, which would need torchvision."""
    made = Qwen3OmniMoeProcessor.__new__(Qwen3OmniMoeProcessor)
    tokenizer = Qwen2TokenizerFast.from_pretrained(checkpoint)
    made.tokenizer = tokenizer
    made.feature_extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    made.image_processor = image_processor_of(checkpoint)
    made.video_processor = VideoProcessor()
    for name in ("image", "audio", "video"):
        setattr(made, f"{name}_token", getattr(tokenizer, f"{name}_token"))
        token_id = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
        setattr(made, f"{name}_token_id", token_id)
    for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos"):
        setattr(made, f"{name}_token", getattr(tokenizer, f"{name}_token"))
    return made


def image_processor_of(folder: Path) -> Any:
    """The one that needs no torchvision."""
    if hasattr(transformers, "Qwen2VLImageProcessorPil"):
        return transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    return transformers.Qwen2VLImageProcessor.from_pretrained(folder)


def patches_of(visuals: Sequence[Visual]) -> torch.Tensor:
    return torch.cat([visual.patches().flatten(0, 1) for visual in visuals])


class VideoProcessor:
    """Stands in for the reference's, and hands out the patches of videos that were read."""

    visuals: Sequence[Visual] = ()
    merge_size = temporal_patch_size = 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        assert len(videos) == len(self.visuals)
        return {
            "pixel_values_videos": patches_of(self.visuals),
            "video_grid_thw": np.array([v.grid for v in self.visuals]),
        }


def of_kind(messages: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [
        item
        for message in messages
        if not isinstance(message["content"], str)
        for item in message["content"]
        if item["type"] == kind
    ]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_are_the_references(prompt_builder, processor, chat_template, name) -> None:
    messages = CONVERSATIONS[name]
    prompt = prompt_builder.prompt(messages)
    text = processor.tokenizer.apply_chat_template(
        messages, chat_template=chat_template, tokenize=False, add_generation_prompt=True
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


@pytest.mark.parametrize("name", CASES)
def test_prompts_with_media_are_the_references(
    prompt_builder, processor, chat_template, name
) -> None:
    case = CASES[name]
    if len(set(case.seconds_per_grid)) > 1:
        pytest.skip("the reference gives all videos of a prompt one frame rate")
    if case.use_audio_in_video and Version(transformers.__version__) >= Version("5"):
        pytest.skip("5.x takes a video's sound out of the file itself; 4.57 takes it as a clip")
    prompt = prompt_builder.prompt(case.messages, case.use_audio_in_video)
    bare = [{**m, "content": bare_content(m["content"])} for m in case.messages]
    text = processor.tokenizer.apply_chat_template(
        bare, chat_template=chat_template, tokenize=False, add_generation_prompt=True
    )
    heard = "video" if case.use_audio_in_video else "audio"
    sounds = [
        load_waveform(item, 16000, "clip")
        for item in media_of(case.messages)
        if item["type"] in ("audio", heard)
    ]
    fps = {"fps": 2 / case.seconds_per_grid[0]} if case.seconds_per_grid else {}
    processor.video_processor.visuals = prompt.videos
    theirs = processor(
        text=text,
        images=[item["image"] for item in media_of(case.messages) if item["type"] == "image"]
        or None,
        videos=[item["video"] for item in media_of(case.messages) if item["type"] == "video"]
        or None,
        audio=sounds or None,
        videos_kwargs={**fps, "use_audio_in_video": case.use_audio_in_video},
        return_tensors="pt",
    )
    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    if prompt.images:
        torch.testing.assert_close(patches_of(prompt.images), theirs["pixel_values"])
        assert [list(v.grid) for v in prompt.images] == theirs["image_grid_thw"].tolist()


def test_results_of_tools_are_read_in_the_order_of_their_calls() -> None:
    """Ids of calls tell the order: a prompt has none."""
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "abc"]
    asked = {"role": "user", "content": "Add."}
    called = {"role": "assistant", "content": None, "tool_calls": calls}

    def result(content: str, call: str | None) -> dict[str, Any]:
        return {"role": "tool", "content": content, "tool_call_id": call}

    def read(*given: dict[str, Any]) -> list[str]:
        checked, _ = read_messages([asked, called, *given], (), pytest.fail)
        return [message["content"] for message in checked[2:]]

    of_a, of_b, of_c = (result(name.upper(), name) for name in "abc")
    again = [{**called, "tool_calls": calls[:1]}, result("second", "a"), asked]
    assert read(of_c, of_a, of_b, *again, of_b) == ["A", "B", "C", "", "second", "Add.", "B"]
    assert read(result("1", None), of_b, result("2", "z"), of_a) == ["A", "B", "1", "2"]
    assert read(result("1", None), result("2", None)) == ["1", "2"]
    assert read(result("1", "z"), asked, of_a) == ["1", "Add.", "A"]


def bare_content(content: Any) -> Any:
    """A video's audio must not be taken for a clip."""
    if isinstance(content, str):
        return content
    return [{k: v for k, v in item.items() if k in ("type", "text")} for item in content]


def test_media_that_alone_exceed_the_context_are_refused_with_the_numbers(prompt_builder) -> None:
    for item, said in (
        (audio(5.0), r"content\[0\] lasts 5.000 s, but the context fits at most 3.846 s"),
        ({**image(64, 64), "min_pixels": 10**12}, r"content\[0\] has \d{9} tokens, .* most 50\."),
        ({**video(4, 2.0), "min_pixels": 10**6}, r"content\[0\] has \d{4} tokens, .* most 50\."),
    ):
        with pytest.raises(PromptTooLongError, match=said):
            prompt_builder.prompt([user(item)], most_tokens=50)


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    items = [item for m in messages if not isinstance(m["content"], str) for item in m["content"]]
    return [item for item in items if item["type"] != "text"]


def test_a_malformed_conversation_is_refused_with_its_place(omni) -> None:
    for messages, said in (
        ([], "the conversation is empty"),
        (" ", "the text to answer is empty"),
        (b"Hello", "messages is a bytes; give a text"),
        ({"role": "user", "content": "x"}, "messages is a dict"),
        (["Hello"], r"messages\[0\] is a str"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\] has role 'robot'.*system, user"),
        ([{"content": "x"}], "has role None"),
        ([{"role": "system", "content": "x"}], "no user message"),
        ([{"role": "user"}], "has content of type NoneType"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] is a int"),
        ([{"role": "user", "content": [{"type": "text"}]}], 'text without a "text"'),
        ([{"role": "user", "content": [{"type": "smell"}]}], "has type 'smell'"),
        ([{"role": "user", "content": "<|audio_pad|>"}], r"messages\[0\] contains <\|audio_pad"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "an <|image_pad|>"}]}],
            r"messages\[0\]\.content\[0\] contains <\|image_pad\|>",
        ),
        (
            [{"role": "assistant", "content": "<|video_pad|>"}, {"role": "user", "content": "?"}],
            r"messages\[0\] contains <\|video_pad",
        ),
        (
            [{"role": "system", "content": [{"type": "image", "image": "x.png"}]}],
            r"messages\[0\]\.content\[0\] is image of role system",
        ),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "audio", "audio": "x.wav"}]},
            ],
            r"messages\[1\]\.content\[0\] is audio of role assistant",
        ),
    ):
        with pytest.raises(MessageError, match=said):
            omni.stream(messages)


@pytest.mark.parametrize("name", ["vocab.json", "preprocessor_config.json"])
def test_a_checkpoint_without_its_text_files_is_refused(checkpoint, config, tmp_path, name) -> None:
    for file in checkpoint.glob("*.*"):
        if file.name != name and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        PromptBuilder(tmp_path, config)


def test_the_chat_template_is_found_in_each_of_its_places(checkpoint, config, tmp_path) -> None:
    for file in checkpoint.glob("*.*"):
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    question = [{"role": "user", "content": "user"}]
    assert PromptBuilder(tmp_path, config).prompt(question).token_ids[0] == config.user_id
    (tmp_path / "chat_template.jinja").unlink()
    assert PromptBuilder(tmp_path, config).prompt(question).token_ids[0] == config.im_start_id
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(CheckpointError, match="no chat template"):
        PromptBuilder(tmp_path, config)
