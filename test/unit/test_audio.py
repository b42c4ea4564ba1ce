"""Sound in every form a caller may have it."""

import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError
from qwen3_omni_neuron.prompt.media.audio import BLOCK_NUMBERS, load_waveform
from testing.media_cases import QUESTION_WAV

RATE = 16000
RATES = [8000, 11025, 22050, 44100, 48000, 96000, 192000]


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def sound_bytes(samples: np.ndarray, rate: int = RATE, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def pieces(samples: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Sound that is still arriving."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def load(audio: Any, limit_s: float = float("inf"), **item: Any) -> np.ndarray:
    return load_waveform({"type": "audio", "audio": audio, **item}, RATE, "here", limit_s)


def test_path_bytes_and_array_are_the_same_sound() -> None:
    samples, rate = soundfile.read(QUESTION_WAV, dtype="float32")
    for audio, item in (
        (QUESTION_WAV, {}),
        (str(QUESTION_WAV), {}),
        (QUESTION_WAV.read_bytes(), {}),
        (samples, {"sampling_rate": rate}),
        ((samples, rate), {}),
        (pieces(samples, 700), {"sampling_rate": rate}),
        ((pieces(samples, 70_000), rate), {}),
        (soundfile.blocks(QUESTION_WAV, blocksize=1000), {"sampling_rate": rate}),
    ):
        loaded = load(audio, **item)
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, samples)


@pytest.mark.parametrize("rate", RATES)
def test_any_rate_becomes_16_khz(rate) -> None:
    loaded = load(tone(rate), sampling_rate=rate)
    assert len(loaded) == pytest.approx(RATE // 2, abs=2)
    middle = slice(1000, -1000)
    expected = tone(RATE)[: len(loaded)]
    assert np.abs(loaded[middle] - expected[: len(loaded)][middle]).max() < 0.01


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.diagonal
def test_a_file_in_blocks_is_the_file_at_once(rate, channels) -> None:
    seconds = 2.2 * BLOCK_NUMBERS / channels / rate
    stored = np.stack([tone(rate, seconds, 100.0 + 50 * i) for i in range(channels)], axis=1)
    assert stored.size > 2 * BLOCK_NUMBERS
    file = sound_bytes(stored / 2, rate, "FLAC")
    at_once = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)[0].mean(axis=1)
    assert np.array_equal(load(file), soxr.resample(at_once, rate, RATE))


@pytest.mark.parametrize("size", [1, 7, 1000, 9000])
@pytest.mark.parametrize("rate", [RATE, 8000, 48000])
@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.diagonal
def test_arriving_blocks_of_any_size_are_the_whole(size, rate, channels) -> None:
    stored = np.stack([tone(rate, 0.1, 200.0 + 90 * i) for i in range(channels)], axis=1)
    whole = load(stored, sampling_rate=rate)
    assert np.array_equal(load(pieces(stored, size), sampling_rate=rate), whole)


@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("channels_first", [False, True])
def test_channels_are_averaged(channels, channels_first) -> None:
    stacked = np.stack([tone(RATE) * (i + 1) for i in range(channels)], axis=1)
    loaded = load(stacked.T if channels_first else stacked, sampling_rate=RATE)
    assert np.allclose(loaded, tone(RATE) * (channels + 1) / 2, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "float64"])
def test_integers_are_scaled_by_their_range(dtype) -> None:
    wave = tone(RATE) * 0.5
    if dtype == "uint8":
        stored = np.round(wave * 127 + 128).astype(np.uint8)
    elif dtype == "float64":
        stored = wave.astype(np.float64)
    else:
        stored = (wave * np.iinfo(dtype).max).astype(dtype)
    assert np.abs(load(stored, sampling_rate=RATE) - wave).max() < 0.01


def test_what_cannot_be_heard_is_refused() -> None:
    for audio, item, said in (
        (None, {}, 'no "audio"'),
        ("/nowhere/x.wav", {}, "does not exist"),
        (b"", {}, "here is empty: 0 bytes"),
        (b"RIFF, but not really", {}, "is of an unknown format"),
        (sound_bytes(np.zeros(0)), {}, "no sound that can be decoded"),
        (np.zeros(0), {"sampling_rate": RATE}, "lasts 0.000 s"),
        (np.zeros((0, 2)), {"sampling_rate": RATE}, "lasts 0.000 s"),
        (np.zeros(100), {"sampling_rate": RATE}, "lasts 0.006 s"),
        (np.zeros(4000), {}, "without its sampling_rate"),
        (np.zeros(4000), {"sampling_rate": 0}, "without its sampling_rate"),
        (np.full(4000, np.nan), {"sampling_rate": RATE}, "4000 of 4000 samples are NaN"),
        (np.full(4000, np.inf), {"sampling_rate": RATE}, "NaN or larger than 2.14748e"),
        (np.zeros((2, 2, 4000)), {"sampling_rate": RATE}, r"shape \[2, 2, 4000\]"),
        (np.array(["a", "b"]), {"sampling_rate": RATE}, "it must be of numbers"),
        (object(), {"sampling_rate": RATE}, "it must be of numbers"),
        ("a" * 5000, {}, r"here: a{200}\.\.\. can't be opened \(File name too long\)"),
        ("a\0b.wav", {}, "can't be opened .embedded null byte"),
        (np.zeros(4000), {"sampling_rate": float("nan")}, "without its sampling_rate"),
        (np.zeros(4000), {"sampling_rate": 16}, "sampling_rate of 16 Hz; 1000 to 1000000 Hz"),
        (sound_bytes(np.zeros(4000), 1), {}, "sampling_rate of 1 Hz"),
        (np.full(4000, 1e300), {"sampling_rate": RATE}, "NaN or larger than 2.14748e"),
        (np.full(4000, -1e18), {"sampling_rate": RATE}, "4000 of 4000 samples are NaN or larger"),
        (iter(()), {"sampling_rate": RATE}, "lasts 0.000 s"),
        (iter([np.zeros(4000)]), {}, "without its sampling_rate"),
        (iter([0.0] * 4000), {"sampling_rate": RATE}, r"here, block 0, has shape \[\]"),
        (iter([b"RIFF"]), {"sampling_rate": RATE}, "here, block 0, is an array of"),
        (io.BytesIO(b"RIFF"), {"sampling_rate": RATE}, "here, block 0, is an array of"),
        (
            iter([np.zeros((300, 2)), np.zeros((300, 1))]),
            {"sampling_rate": RATE},
            "here, block 1, has 1 channels, but the earlier blocks have 2",
        ),
        (
            iter([np.zeros(RATE), np.r_[np.zeros(400), np.nan]]),
            {"sampling_rate": RATE},
            "here: 1 of 401 samples are NaN.*begins at 1.000 s",
        ),
    ):
        with pytest.raises(AudioError, match=said) as caught:
            load(audio, **item)
        assert str(caught.value).startswith("here")


def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path) -> None:
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    with pytest.raises(AudioError, match="is not a regular file"):
        load(pipe)


@pytest.mark.parametrize("rate", [RATE, *RATES])
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_clipped_and_silent_sound_is_heard(rate, channels) -> None:
    square = np.sign(tone(rate, 0.5) + 1e-3)
    for wave in (square, np.zeros_like(square)):
        stored = np.repeat(wave[:, None], channels, axis=1).astype(np.float32)
        heard = load(sound_bytes(stored, rate))
        assert len(heard) == pytest.approx(RATE // 2, abs=2)
        assert np.isfinite(heard).all()
        assert np.abs(heard).max() == pytest.approx(np.abs(wave).max(), abs=0.3)


def test_a_file_that_is_too_long_is_refused_by_its_header() -> None:
    file = sound_bytes(tone(RATE, 10.0), kind="FLAC")
    assert len(load(file[:], limit_s=10.0)) == 10 * RATE
    undecodable = file[:100] + bytes(len(file) - 100)
    with pytest.raises(AudioError):
        load(undecodable)
    with pytest.raises(PromptTooLongError, match=r"here lasts 10\.000 s, .* most 9\.999 s"):
        load(undecodable, limit_s=9.999)


def test_an_array_that_is_too_long_is_refused() -> None:
    wave = tone(48000, 1.0)
    assert len(load(wave, sampling_rate=48000, limit_s=1.0)) == RATE
    wave[-1] = np.nan
    with pytest.raises(PromptTooLongError, match=r"lasts 1\.000 s, .* most 0\.500 s"):
        load(wave, sampling_rate=48000, limit_s=0.5)


def test_arriving_sound_is_left_where_the_limit_is_passed() -> None:
    taken = []

    def microphone() -> Iterator[np.ndarray]:
        for index in range(1000):
            taken.append(index)
            yield np.zeros((800, 2))

    with pytest.raises(PromptTooLongError, match=r"lasts 2\.100 s or more, .* most 2\.000 s"):
        load(microphone(), sampling_rate=8000, limit_s=2.0)
    assert len(taken) == 21


def test_arriving_sound_within_the_limit_is_heard() -> None:
    heard = load(pieces(tone(8000, 2.0), 800), sampling_rate=8000, limit_s=2.0)
    assert len(heard) == 2 * RATE


def test_an_arriving_sounds_own_error_is_the_callers() -> None:
    def broken() -> Iterator[np.ndarray]:
        yield np.zeros(4000)
        raise ConnectionResetError("microphone unplugged")

    with pytest.raises(ConnectionResetError, match="unplugged"):
        load(broken(), sampling_rate=RATE)
