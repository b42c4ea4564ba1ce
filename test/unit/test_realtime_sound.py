"""Formats of the socket's sound, against libsndfile's."""

import base64
import io

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    MOST_SOUND_BYTES,
    Resampler,
    codec_of,
    decoded_sound,
    encoded_sound,
)

SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


def by_libsndfile(data: bytes, subtype: str) -> NDArray[np.float32]:
    form = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": subtype}
    return soundfile.read(io.BytesIO(data), dtype="float32", **form)[0]


@pytest.mark.parametrize("kind", SUBTYPES)
def test_every_byte_is_the_sample_that_it_is_elsewhere(kind) -> None:
    codes = bytes(range(256))
    ours = codec_of(kind, None).decode(codes)
    assert np.array_equal(ours, by_libsndfile(codes, SUBTYPES[kind]))


@pytest.mark.parametrize("kind", SUBTYPES)
def test_every_sample_is_the_nearest_byte_or_its_neighbour(kind) -> None:
    """16-bit samples of all sizes, beyond full scale too; encoders may round to either side."""
    codec = codec_of(kind, None)
    samples = np.linspace(-1.2, 1.2, 200_001).astype(np.float32)
    back = codec.decode(codec.encode(samples))
    levels = np.unique(codec.decode(bytes(range(256))))
    wanted = samples.clip(levels[0], levels[-1])
    at = np.searchsorted(levels, wanted).clip(1, len(levels) - 1)
    step = levels[at] - levels[at - 1]
    assert (np.abs(back - wanted) <= step).all()
    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), 8000, format="RAW", subtype=SUBTYPES[kind])
    theirs = by_libsndfile(file.getvalue(), SUBTYPES[kind])
    assert np.abs(back - theirs).max() <= np.abs(step).max() + 1e-6
    assert np.mean(np.abs(back - wanted)) < 1.1 * np.mean(np.abs(theirs - wanted))


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
