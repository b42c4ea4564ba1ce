"""Images, videos and sound against the reference: hidden states, and whole replies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.cpu.encoders import PATCHES_AT_ONCE, CpuVision
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.pixels import Visual
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.oracle import Reference, media_inputs
from testing.media_cases import CASES, Case, audio, text, user, write_deeper_checkpoint
from testing.models import load_models
from testing.prompts import random_visual
from testing.replies import GREEDY, assert_alike, assert_same, reply_to_the_limit

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GRIDS = {
    "square": [(1, 4, 4)],
    "least": [(1, 2, 2)],
    "row": [(1, 2, 12)],
    "larger-than-the-learned-square": [(1, 10, 16)],
    "three-images": [(1, 4, 6), (1, 2, 2), (1, 8, 4)],
    "video": [(5, 4, 6)],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_deeper_checkpoint(tmp_path_factory.mktemp("deeper"))


@pytest.fixture(scope="module")
def config(checkpoint) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="module")
def models(checkpoint, config) -> Models:
    return load_models(Checkpoint(checkpoint), config, torch.float32)


@pytest.fixture(scope="module")
def reference(checkpoint) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def omni(checkpoint) -> Iterator[Qwen3Omni]:
    """Without the prefix cache, since a test calls its engines behind the runtime's back."""
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=2, reuse=False) as omni:
        yield omni


def reference_vision(reference: Reference, pictures: list[Visual]) -> torch.Tensor:
    """[1 + deepstack, rows, hidden]."""
    values = torch.cat([p.patches().flatten(0, 1) for p in pictures])
    thinker = reference.model.thinker
    visual = getattr(thinker, "visual", None) or thinker.model.visual
    out = visual(values, grid_thw=torch.tensor([p.grid for p in pictures]))
    rows, deepstack = (
        (out.pooler_output, out.deepstack_features) if TRANSFORMERS_5 else (out[0], out[1])
    )
    return torch.stack((rows, *deepstack))


@torch.no_grad()
@pytest.mark.parametrize("name", GRIDS)
def test_pictures_of_every_grid_are_encoded_as_the_references(
    checkpoint, models, reference, name
) -> None:
    """Every grid that the processor makes: rows for the thinker, and deepstack features."""
    pictures = [random_visual(checkpoint, grid) for grid in GRIDS[name]]
    ours = CpuVision(models.vision_encoder).encode(pictures)
    torch.testing.assert_close(ours, reference_vision(reference, pictures), **CLOSE)
    assert len(ours) == 4


@torch.no_grad()
def test_nothing_in_the_padding_of_a_frame_matters(checkpoint, models) -> None:
    pictures = [random_visual(checkpoint, grid) for grid in ((3, 4, 6), (1, 4, 4))]
    exact = CpuVision(models.vision_encoder).encode(pictures)
    for buckets in [(16, 24), (28,), (16, 64)]:
        padded = CpuVision(models.vision_encoder, buckets).encode(pictures)
        torch.testing.assert_close(padded, exact, **CLOSE)
    garbage = torch.full((1, 32, 3 * 2 * 16**2), 1e4)
    garbage[:, :16] = pictures[1].patches()
    places = torch.full((2, 32), 3)
    places[:, :16] = torch.tensor(
        [[0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2, [0, 1] * 2 + [2, 3] * 2 + [0, 1] * 2 + [2, 3] * 2]
    )
    encoded = models.vision_encoder(garbage, places, torch.tensor((4, 4)), torch.arange(32) < 16)
    torch.testing.assert_close(encoded[:, 0, :4], exact[:, -4:], **CLOSE)


@torch.no_grad()
def test_frames_and_images_do_not_see_each_other(checkpoint, models) -> None:
    vision = CpuVision(models.vision_encoder)
    video = random_visual(checkpoint, (2, 4, 4))
    frames = [video.part(0, 1), video.part(1, 2)]
    apart = torch.cat([vision.encode([frame]) for frame in frames], 1)
    torch.testing.assert_close(vision.encode([video]), apart, **CLOSE)
    torch.testing.assert_close(vision.encode(frames), apart, **CLOSE)


@torch.no_grad()
def test_a_long_video_becomes_patches_a_few_frames_at_a_time(
    checkpoint, models, monkeypatch
) -> None:
    """Memory of encoding does not grow with its length."""
    made, patches = [], Visual.patches

    def counted(visual: Visual) -> torch.Tensor:
        made.append(visual.grid[0])
        return patches(visual)

    monkeypatch.setattr(Visual, "patches", counted)
    encoded = CpuVision(models.vision_encoder).encode([random_visual(checkpoint, (9, 32, 32))])
    assert made == [4, 4, 1]
    assert PATCHES_AT_ONCE == 4 * 32 * 32
    assert encoded.shape[1] == 9 * 32 * 32 // 4


def reference_inputs(prompt: Prompt, case: Case) -> dict[str, Any]:
    inputs: dict[str, Any] = {"use_audio_in_video": case.use_audio_in_video, **media_inputs(prompt)}
    if case.seconds_per_grid:
        inputs["video_second_per_grid"] = torch.tensor(case.seconds_per_grid)
    return inputs


def skip_what_the_reference_cannot(prompt: Prompt) -> None:
    if prompt.images and prompt.videos and not TRANSFORMERS_5:
        pytest.skip("4.57 fails where a prompt has both an image and a video")


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_thinkers_logits_and_hidden_states_are_the_references(
    omni, config, reference, name
) -> None:
    """Deepstack included; the accept layer's rows are those of every audio, image and video
    position, and none of them is zero."""
    case = CASES[name]
    prompt = omni.prompt_builder.prompt(case.messages, case.use_audio_in_video)
    skip_what_the_reference_cannot(prompt)
    logits, accepted = omni._pipeline._engines.thinker.prefill(0, prompt)
    ids = prompt.token_ids[None]
    theirs = reference.model.thinker(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        output_hidden_states=True,
        **reference_inputs(prompt, case),
    )
    torch.testing.assert_close(logits[0], theirs.logits[0, -1], **CLOSE)
    media = torch.isin(prompt.token_ids, torch.tensor(config.thinker.media_token_ids))
    layer = config.talker.accept_hidden_layer
    torch.testing.assert_close(accepted, theirs.hidden_states[layer][0, media], **CLOSE)
    assert (accepted.abs().sum(1) > 1).all()


@pytest.mark.parametrize("name", CASES)
def test_a_reply_to_media_is_the_references(omni, reference, name) -> None:
    case = CASES[name]
    skip_what_the_reference_cannot(
        omni.prompt_builder.prompt(case.messages, case.use_audio_in_video)
    )
    ours, theirs = reply_to_the_limit(
        omni,
        reference,
        case.messages,
        tokens=5,
        talker_max_new_tokens=8,
        video_second_per_grid=case.seconds_per_grid,
        use_audio_in_video=case.use_audio_in_video,
    )
    assert_same(ours, theirs, reference)


@pytest.mark.parametrize("seconds", [0.3, 7.9, 8.0, 8.1, 30.0, 120.0])
def test_a_reply_to_a_clip_of_any_length_is_the_references(omni, reference, seconds) -> None:
    if seconds == 8.1 and not TRANSFORMERS_5:
        pytest.skip("4.57 pads a window of under 1 s otherwise when it is given it alone")
    messages = [user(audio(seconds), text("What do you hear?"))]
    ours, theirs = reply_to_the_limit(omni, reference, messages, tokens=4, talker_max_new_tokens=6)
    assert_same(ours, theirs, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_media_in_other_precisions(checkpoint, dtype) -> None:
    with Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1) as omni:
        result = omni.generate_audio(
            CASES["image-and-video"].messages,
            thinker_max_new_tokens=3,
            talker_max_new_tokens=4,
            **GREEDY,
        )
    assert result.audio.shape == (3 * 1920 - 555,)


def test_media_reach_engines_in_processes_of_their_own(omni, checkpoint) -> None:
    case = CASES["video-heard-and-image"]
    options = {"use_audio_in_video": True, "thinker_max_new_tokens": 3, "talker_max_new_tokens": 4}
    expected = omni.generate_audio(case.messages, **options, **GREEDY)
    load = {"dtype": "float32", "max_concurrency": 1, "placement": "split"}
    with Qwen3Omni.load(checkpoint, **load) as split:
        result = split.generate_audio(case.messages, **options, **GREEDY)
    assert_alike(result, expected)
