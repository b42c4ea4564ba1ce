"""Log-mel features in blocks, held against the checkpoint's own extractor."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from qwen3_omni_neuron.errors import AudioError, CheckpointError
from qwen3_omni_neuron.prompt.media.log_mel import (
    BLOCK_FRAMES,
    Clip,
    LogMelStream,
    MelSettings,
    features,
    log_mel,
    scaled,
)

RATE = 16000
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def extractor(checkpoint) -> Any:
    return WhisperFeatureExtractor.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def settings(extractor) -> MelSettings:
    return MelSettings.of(extractor.to_dict())


def theirs(extractor: Any, clips: list[np.ndarray]) -> list[Tensor]:
    batch = extractor(
        clips,
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    masks = batch["attention_mask"].bool()
    return [mel[:, mask] for mel, mask in zip(batch["input_features"], masks, strict=True)]


def ours_of(clips: list[np.ndarray], settings: MelSettings) -> list[Tensor]:
    return features([Clip(clip, settings) for clip in clips])


def speechlike(samples: int, seed: int = 0) -> np.ndarray:
    """Noise in bursts, 90 dB apart, so that the floor counts."""
    noise = np.random.default_rng(seed).standard_normal(samples) * 0.2
    loudness = np.sin(np.arange(samples) / 3000.0 + seed)
    return (noise * np.exp(5.0 * loudness - 5.0)).astype(np.float32)


@pytest.mark.parametrize(
    ("seconds", "tokens"),
    [(0.3, 4), (7.9, 103), (8.0, 104), (8.1, 106), (30.0, 390), (120.0, 1560)],
)
def test_features_of_clips_of_any_length_are_the_extractors(
    extractor, settings, config, seconds, tokens
) -> None:
    clip = speechlike(round(seconds * RATE))
    ours = log_mel(clip, settings)
    assert ours.shape == (128, round(seconds * 100))
    assert config.thinker.audio.tokens(ours.shape[1]) == tokens
    torch.testing.assert_close(ours, theirs(extractor, [clip])[0], **CLOSE)


# Around a whole number of frames (160 samples), of windows (400), of blocks (160,000).
SAMPLES = [480, 481, 639, 640, 641, 799, 800, 801, 159_999, 160_000, 160_001, 160_200, 160_201]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("longest", [0, 1, 39, 40, 41, 200, 399, 400, 401, 5000])
@pytest.mark.diagonal
def test_features_of_a_clip_beside_a_longer_one_are_the_extractors(
    extractor, settings, samples, longest
) -> None:
    """The shorter one is padded with zeros, of which its last frames see some."""
    clips = [speechlike(samples), speechlike(samples + longest, seed=3)]
    ours, expected = ours_of(clips, settings), theirs(extractor, clips)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("samples", [16_000, 16_159])
@pytest.mark.parametrize("at", [0, 100, 8000, -1])
@pytest.mark.parametrize("longest", [0, 16_080, 17_000])
def test_the_peak_may_lie_at_either_end(extractor, settings, samples, at, longest) -> None:
    """Even in a frame that begins after the clip, and is none of its own: the last of 16,159
    samples is 158 after the middle of the clip's last frame, and 2 before that of the next."""
    click = speechlike(samples) * 1e-3
    click[at] = 0.9
    clips = [click, np.zeros(longest, np.float32)]
    for mine, other in zip(ours_of(clips, settings), theirs(extractor, clips), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("kind", ["silent", "clipped"])
def test_silence_and_clipped_sound(extractor, settings, kind) -> None:
    clip = np.sign(speechlike(20_000)) if kind == "clipped" else np.zeros(20_000, np.float32)
    ours = log_mel(clip, settings)
    torch.testing.assert_close(ours, theirs(extractor, [clip])[0], **CLOSE)
    if kind == "silent":
        assert (ours == -1.5).all()


@pytest.mark.parametrize("block", [1, 159, 160, 161, 400, 7777, 10**6])
def test_frames_are_the_same_whatever_the_blocks(settings, block) -> None:
    clip = speechlike(33_333)
    stream = LogMelStream(settings)
    pieces, peaks, done = [], [stream.peak], 0
    for start in range(0, len(clip), block):
        pieces.append(stream.push(clip[start : start + block]))
        done += pieces[-1].shape[1]
        heard = min(start + block, len(clip))
        # A frame is complete 200 samples after its middle; they are computed in blocks.
        complete = max(0, (heard - 200) // 160 + 1)
        assert done == complete - complete % BLOCK_FRAMES
        peaks.append(stream.peak)
    end, peak = stream.finish()
    raw = torch.cat([*pieces, end], 1)
    assert peak == raw.max().item()
    assert peaks == sorted(peaks)
    assert torch.equal(scaled(raw, peak), log_mel(clip, settings))


@pytest.mark.parametrize("frames", [3, 99, 199, 201, 203, 399, 407])
def test_frames_are_the_same_however_many_follow(settings, frames) -> None:
    """To the bit: a frame that is computed again where the clip goes on is the same."""
    clip = speechlike(100_000)
    early, late = LogMelStream(settings), LogMelStream(settings)
    found = []
    for stream, samples in ((early, clip[: frames * 160]), (late, clip)):
        found.append(torch.cat((stream.push(samples), stream.finish()[0]), 1))
    complete = frames - 2  # the last two see the clip's end
    assert torch.equal(found[0][:, :complete], found[1][:, :complete])


def test_a_very_short_clip_beside_a_longer_one(extractor, settings) -> None:
    for samples in (0, 3, 200):
        stream = LogMelStream(settings)
        clip = speechlike(samples)
        stream.push(clip)
        raw, peak = stream.finish(4000)
        expected = theirs(extractor, [clip, np.zeros(4000, np.float32)])[0]
        torch.testing.assert_close(scaled(raw, peak), expected, **CLOSE)


def test_too_few_samples_are_refused(settings) -> None:
    with pytest.raises(AudioError, match=r"200 samples are too few .*; 201 is the minimum"):
        log_mel(speechlike(200), settings)
    assert log_mel(speechlike(201), settings).shape == (128, 1)
    assert features([]) == []


def test_features_made_otherwise_are_refused(extractor) -> None:
    for name, value, said in (
        ("dither", 0.1, "dither 0.1; only 0.0 is supported"),
        ("padding_value", 1.0, "padding_value 1.0"),
        ("padding_side", "left", "padding_side 'left'; only 'right'"),
        ("n_fft", 401, "n_fft 401 and hop_length 160"),
        ("hop_length", 200, "n_fft 400 and hop_length 200"),
    ):
        other = copy.copy(extractor)
        setattr(other, name, value)
        with pytest.raises(CheckpointError, match=said):
            MelSettings.of(other.to_dict())


def test_parameters_are_the_extractors(extractor) -> None:
    """Another window, another hop, other bands: nothing is the released checkpoint's by heart."""
    other = WhisperFeatureExtractor(feature_size=40, n_fft=512, hop_length=128)
    clips = [speechlike(9000), speechlike(4321)]
    ours = ours_of(clips, MelSettings.of(other.to_dict()))
    for mine, expected in zip(ours, theirs(other, clips), strict=True):
        torch.testing.assert_close(mine, expected, **CLOSE)
