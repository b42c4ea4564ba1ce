"""Layers of the audio and the vision encoder in C: torch's, and the same bits by every division."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeEncoderLayer
from qwen3_omni_neuron.cpu.native.engines import native_audio, native_vision
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.rotary import Rotation
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, patch_places
from testing.native_library import needs_c
from testing.native_modules import DTYPES, assert_close_in, assert_equal
from testing.packed import packed_and_widened, randomize
from testing.prompts import random_visual

pytestmark = needs_c
# hidden, heads, feed-forward: heads of 18 floats, which fill no vector; of 72, as released; of 64,
# and work enough to share.
SIZES = [(54, 3, 77), (144, 2, 301), (256, 4, 520)]


def audio_encoder(config: OmniConfig, hidden: int, heads: int, ffn: int) -> AudioEncoder:
    c = dataclasses.replace(
        config.thinker.audio, hidden_size=hidden, heads=heads, ffn_width=ffn, layers=2
    )
    encoder = AudioEncoder(c)
    randomize(encoder)
    return encoder


def vision_encoder(config: OmniConfig, hidden: int, heads: int, ffn: int) -> VisionEncoder:
    c = dataclasses.replace(
        config.thinker.vision, hidden_size=hidden, heads=heads, ffn_width=ffn, layers=3,
        deepstack_layers=(0, 2),
    )  # fmt: skip
    encoder = VisionEncoder(c)
    randomize(encoder)
    return encoder


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["audio", "vision"])
@pytest.mark.pairs
def test_a_layer_is_torchs_whatever_is_beside_a_frame_and_the_threads(
    config: OmniConfig, library: Library, kind: str, sizes: tuple[int, int, int], dtype: str
) -> None:
    """Frames of 24 rows, of which 24, 23, 5 and 1 are real."""
    if kind == "audio":
        packed, widened = packed_and_widened(audio_encoder(config, *sizes), "audio_encoder", dtype)
        before: tuple[Rotation, ...] = ()
    else:
        hidden, heads, ffn = sizes
        eye = vision_encoder(config, heads * (hidden // heads // 4 * 4), heads, ffn)
        packed, widened = packed_and_widened(eye, "vision_encoder", dtype)
        before = (eye._rotation(patch_places(4, 6, eye.config.merge_size)),)
    layer, theirs = packed.layers[1], widened.layers[1]
    x = torch.randn(4, 24, layer.out.in_features)
    real = torch.arange(24) < torch.tensor([24, 23, 5, 1])[:, None]
    mask, given = real[:, None, None], x.clone()
    got = NativeEncoderLayer(layer, library, 1)(x, *before, mask)
    assert_equal(x, given)
    assert_close_in(dtype, got[real], theirs(x, *before, mask)[real], 2e-5, 2e-5)
    for threads in (1, 2, 4):
        native = NativeEncoderLayer(layer, library, threads)
        assert_equal(native(x, *before, mask), got)
        for frame in range(4):
            own = slice(frame, frame + 1)
            assert_equal(native(x[own], *before, mask[own]), got[own])
    broken = x.clone()
    broken[2] = float("nan")
    broken[1, 23:] = float("nan")  # beyond its real rows
    after = NativeEncoderLayer(layer, library, 4)(broken, *before, mask)
    assert after[2].isnan().all()
    real[2] = False
    assert_equal(after[real], got[real])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoders_are_torchs_whatever_the_threads(
    checkpoint: Path, config: OmniConfig, library: Library, dtype: str
) -> None:
    """Two clips of 9.5 and 0.4 s; two frames of 4 by 6 patches."""
    ear, eye = audio_encoder(config, *SIZES[2]), vision_encoder(config, *SIZES[1])
    clips = [torch.rand(ear.config.mel_bins, frames) for frames in (950, 40)]
    video = random_visual(checkpoint, (2, 4, 6))
    heard, seen = [], []
    ear_packed, ear_wide = packed_and_widened(ear, "audio_encoder", dtype)
    eye_packed, eye_wide = packed_and_widened(eye, "vision_encoder", dtype)
    for threads in (1, 2, 4):
        audio = native_audio(copy.deepcopy(ear_packed), library, threads)
        vision = native_vision(copy.deepcopy(eye_packed), library, threads)
        heard.append(audio.encode(clips))
        seen.append(vision.encode([video]))
    assert_close_in(dtype, heard[0], CpuAudio(ear_wide).encode(clips), 2e-5, 2e-5)
    assert_close_in(dtype, seen[0], CpuVision(eye_wide).encode([video]), 2e-5, 2e-5)
    for some in (heard, seen):
        assert_equal(some[1], some[0])
        assert_equal(some[2], some[0])
