"""Sound in every form a caller may have it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from conftest import QUESTION_WAV
from qwen3_omni_neuron.audio_input import load_waveform
from qwen3_omni_neuron.errors import AudioError

RATE = 16000


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def load(audio: Any, **item: Any) -> np.ndarray:
    return load_waveform({"type": "audio", "audio": audio, **item}, RATE, "here")


def test_path_bytes_and_array_are_the_same_sound() -> None:
    samples, rate = soundfile.read(QUESTION_WAV, dtype="float32")
    for audio, item in (
        (QUESTION_WAV, {}),
        (str(QUESTION_WAV), {}),
        (QUESTION_WAV.read_bytes(), {}),
        (samples, {"sampling_rate": rate}),
        ((samples, rate), {}),
    ):
        loaded = load(audio, **item)
        assert loaded.dtype == np.float32
        assert np.array_equal(loaded, samples)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 192000])
def test_any_rate_becomes_16_khz(rate: int) -> None:
    loaded = load(tone(rate), sampling_rate=rate)
    assert len(loaded) == pytest.approx(RATE // 2, abs=2)
    middle = slice(1000, -1000)
    expected = tone(RATE)[: len(loaded)]
    assert np.abs(loaded[middle] - expected[: len(loaded)][middle]).max() < 0.01


@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("channels_first", [False, True])
def test_channels_are_averaged(channels: int, channels_first: bool) -> None:
    stacked = np.stack([tone(RATE) * (i + 1) for i in range(channels)], axis=1)
    loaded = load(stacked.T if channels_first else stacked, sampling_rate=RATE)
    assert np.allclose(loaded, tone(RATE) * (channels + 1) / 2, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "float64"])
def test_integers_are_scaled_by_their_range(dtype: str) -> None:
    wave = tone(RATE) * 0.5
    if dtype == "uint8":
        stored = np.round(wave * 127 + 128).astype(np.uint8)
    elif dtype == "float64":
        stored = wave.astype(np.float64)
    else:
        stored = (wave * np.iinfo(dtype).max).astype(dtype)
    assert np.abs(load(stored, sampling_rate=RATE) - wave).max() < 0.01


def wav_bytes(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


@pytest.mark.parametrize(
    ("audio", "item", "said"),
    [
        (None, {}, 'no "audio"'),
        ("/nowhere/x.wav", {}, "does not exist"),
        (b"", {}, "0 bytes can't be read"),
        (b"RIFF, but not really", {}, "can't be read as sound"),
        (wav_bytes(np.zeros(0)), {}, "lasts 0.000 s"),
        (np.zeros(0), {"sampling_rate": RATE}, "lasts 0.000 s"),
        (np.zeros((0, 2)), {"sampling_rate": RATE}, "lasts 0.000 s"),
        (np.zeros(100), {"sampling_rate": RATE}, "lasts 0.006 s"),
        (np.zeros(4000), {}, "without its sampling_rate"),
        (np.zeros(4000), {"sampling_rate": 0}, "without its sampling_rate"),
        (np.full(4000, np.nan), {"sampling_rate": RATE}, "4000 of 4000 samples are NaN"),
        (np.full(4000, np.inf), {"sampling_rate": RATE}, "NaN or infinite"),
        (np.zeros((2, 2, 4000)), {"sampling_rate": RATE}, r"shape \[2, 2, 4000\]"),
        (np.array(["a", "b"]), {"sampling_rate": RATE}, "numbers are needed"),
        (object(), {"sampling_rate": RATE}, "numbers are needed"),
    ],
)
def test_what_cannot_be_heard_is_refused(audio: Any, item: Any, said: str) -> None:
    with pytest.raises(AudioError, match=said):
        load(audio, **item)


def test_a_folder_is_no_sound(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="can't be read as sound"):
        load(tmp_path)


def test_silence_is_heard() -> None:
    assert not load(np.zeros(RATE), sampling_rate=RATE).any()
