"""Formats of the socket's sound, and its resampling."""

import base64

import numpy as np
import pytest
import soxr

from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    MOST_SOUND_BYTES,
    Resampler,
    codec_of,
    decoded_sound,
    encoded_sound,
)


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
def test_every_sample_is_the_nearest_byte_or_its_neighbour(kind: str) -> None:
    """16-bit samples of all sizes, beyond full scale too; encoders may round to either side."""
    codec = codec_of(kind, None)
    samples = np.linspace(-1.2, 1.2, 200_001).astype(np.float32)
    back = codec.decode(codec.encode(samples))
    levels = np.unique(codec.decode(bytes(range(256))))
    wanted = samples.clip(levels[0], levels[-1])
    at = np.searchsorted(levels, wanted).clip(1, len(levels) - 1)
    step = levels[at] - levels[at - 1]
    assert (np.abs(back - wanted) <= step).all()
    assert np.mean(np.abs(back - wanted)) < 0.2 * np.mean(step)


@pytest.mark.parametrize("rates", [(24000, 16000), (8000, 16000), (24000, 8000), (16000, 16000)])
@pytest.mark.parametrize("size", [1, 160, 999])
def test_sound_in_pieces_is_resampled_as_a_whole(rates, size) -> None:
    samples = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    resampler = Resampler(*rates)
    parts = [resampler.push(samples[i : i + size]) for i in range(0, len(samples), size)]
    ours = np.concatenate([*parts, resampler.finish()])
    wanted = soxr.resample(samples, *rates)
    assert abs(len(ours) - len(wanted)) <= 1
    least = min(len(ours), len(wanted))
    assert np.abs(ours[:least] - wanted[:least]).max() < 1e-4
    assert not len(resampler.finish())


def test_what_is_no_sound_is_refused() -> None:
    codec = codec_of("audio/pcm", 24000)
    for text, code in (
        ("%", "invalid_base64"),
        ("AA==", "invalid_value"),
        ("A" * (MOST_SOUND_BYTES * 4 // 3 + 8), "audio_too_large"),
    ):
        with pytest.raises(ApiError) as refused:
            decoded_sound(text, codec, "audio")
        assert (refused.value.code, refused.value.param) == (code, "audio")


def test_samples_beyond_full_scale_are_clipped() -> None:
    codec = codec_of("audio/pcm", 24000)
    data = base64.b64decode(encoded_sound(np.array([1.5, -1.5], np.float32), codec))
    assert np.frombuffer(data, "<i2").tolist() == [32767, -32767]
