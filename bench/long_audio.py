"""One hour of audio: to encoder rows, beside transformers' own, and to its transcript.

    python -m bench.long_audio --json result.json

A row is a step, with its time and peak memory, in a process of its own over a tiny checkpoint.
transformers' WhisperFeatureExtractor, whose features are equal to ours, is measured beside ours.
The transcripts are those of an hour with pauses, without pauses, of music and of silence, by the
checkpoint that ships, with at most --max-new-tokens of each window. heard_s of audio_s is what the
model got, in `windows` requests: all of it but for silence. whole: with pauses, where the
checkpoint knows what is said, whether the text is all of it; without them it writes nonsense.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from bench.common.measure import in_new_process
from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.cpu.encoders import CpuAudio
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel
from qwen3_omni_neuron.transcription import Transcript, transcribe
from testing.command_line import Figures, Row, parser_of, run
from testing.headlines import headline
from testing.media_cases import QUESTION_WAV, RATE
from testing.memory import peak_mb
from testing.models import load_models
from testing.tiny import write_tiny_checkpoint
from train.espeak import VOICES, speak

FILE_RATE = 48000
WORDS = "three five seven"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("long_audio", __doc__)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    return run("long_audio", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every step: a row for each. The summary has their peaks."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), options.seconds
        write_audio(folder / "audio.wav", seconds)
        for step, function in STEPS.items():
            rows.append({"step": step, **in_new_process(function, folder, seconds)})
        for kind in SOUNDS:
            found = in_new_process(transcript, kind, folder, seconds, options.max_new_tokens)
            rows.append({"step": f"transcript of {kind}", **found})
    heard = [row for row in rows if "audio_s" in row]
    headlines = [
        headline("RTF of transcripts", [row["time_s"] / row["audio_s"] for row in heard]),
        headline("peak of memory", [row["peak_mb"] for row in heard], "MB"),
    ]
    return rows, {row["step"]: row["peak_mb"] for row in rows}, headlines


def write_audio(path: Path, seconds: int) -> None:
    """Write noise, 48 kHz stereo, 16 bits."""
    second = np.random.default_rng(0).uniform(-0.3, 0.3, (FILE_RATE, 2)).astype(np.float32)
    with soundfile.SoundFile(path, "w", FILE_RATE, 2) as file:
        for _ in range(seconds):
            file.write(second)


def words_and_pause(pause_s: float) -> np.ndarray:
    """Return WORDS by espeak-ng and a pause, float32 [samples] at 16 kHz."""
    return np.append(
        speak(WORDS, VOICES["chelsie"], RATE), np.zeros(int(pause_s * RATE), np.float32)
    )


def chords(seconds: int = 12) -> np.ndarray:
    """Return three chords of decaying tones in turn, a second each, float32 at 16 kHz."""
    times = np.arange(RATE) / RATE
    tones = [
        sum(np.sin(2 * np.pi * 220 * 2 ** (note / 12) * times) for note in notes)
        for notes in ((0, 4, 7), (5, 9, 12), (7, 11, 14))
    ]
    music = np.concatenate([tones[number % 3] * np.exp(-2 * times) for number in range(seconds)])
    return (0.2 * music).astype(np.float32)


def transcript(kind: str, folder: Path, seconds: int, max_new_tokens: int) -> dict[str, Any]:
    """Measure a transcript, and how much of the sound the model gets."""
    path, made = folder / "sound.wav", SOUNDS[kind]()
    times = seconds * RATE // len(made)
    with soundfile.SoundFile(path, "w", RATE, 1) as file:
        for _ in range(times):
            file.write(made)
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1) as omni:
        list(transcribe(omni, [QUESTION_WAV]))  # the peak has no first call of the model
        heard, start = list[int](), omni.stream_text

        def stream_text(messages: Any, **options: Any) -> Any:
            heard.append(len(messages[0]["content"][0]["audio"]))
            return start(messages, **options)

        omni.stream_text = stream_text  # type: ignore[method-assign]
        before = peak_mb()
        (found,) = transcribe(omni, [path], max_new_tokens=max_new_tokens)
        grown_mb = peak_mb() - before
    assert isinstance(found, Transcript), found
    return {
        "time_s": found.total_s,
        "peak_mb": grown_mb,
        "audio_s": found.audio_s,
        "heard_s": sum(heard) / RATE,
        "windows": len(heard),
        "whole": None if kind != "pauses" else found.text == " ".join([WORDS] * times),
    }


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Return a call's seconds, and the megabytes of its peak memory above the memory before.

    The peak includes the call's result.
    """
    before, start = peak_mb(), time.perf_counter()
    result = work()
    taken = {"time_s": time.perf_counter() - start, "peak_mb": peak_mb() - before}
    return {**taken, "result_mb": result.nbytes / 2**20}


def read_file(folder: Path, seconds: int) -> dict[str, float]:
    """Measure reading and resampling the file."""
    return measured(lambda: load_waveform({"audio": folder / "audio.wav"}, 16000, "audio"))


def features(folder: Path, seconds: int) -> dict[str, float]:
    """Measure our log-mel features."""
    settings, waveform = MelSettings.of(extractor(folder).to_dict()), noise(seconds)
    return measured(lambda: log_mel(waveform, settings))


def features_of_transformers(folder: Path, seconds: int) -> dict[str, float]:
    """Measure transformers' log-mel features."""
    made, waveform = extractor(folder), noise(seconds)
    options = {"sampling_rate": 16000, "padding": True, "truncation": False}
    return measured(lambda: made([waveform], return_tensors="np", **options)["input_features"])


def encode(folder: Path, seconds: int) -> dict[str, float]:
    """Measure the audio encoder."""
    checkpoint = write_tiny_checkpoint(folder / "checkpoint")
    files, config = Checkpoint(checkpoint), read_config(checkpoint)
    encoder = load_models(files, config, torch.float32, ("thinker",)).audio_encoder
    assert encoder is not None
    audio, mel = CpuAudio(encoder), torch.rand(128, 100 * seconds)
    with torch.inference_mode():
        return measured(lambda: audio.encode([mel]))


def noise(seconds: int) -> np.ndarray:
    """Return noise, float32 [samples] at 16 kHz."""
    # In float32 from the start: a larger peak before the measured work would hide that of the work.
    return np.random.default_rng(0).random(16000 * seconds, dtype=np.float32) * np.float32(0.3)


def extractor(folder: Path) -> Any:
    """Load transformers' feature extractor of a tiny checkpoint."""
    from transformers import WhisperFeatureExtractor  # most steps do without: it takes seconds

    return WhisperFeatureExtractor.from_pretrained(write_tiny_checkpoint(folder / "checkpoint"))


SOUNDS: dict[str, Callable[[], np.ndarray]] = {
    "pauses": lambda: words_and_pause(1.5),
    "no pauses": lambda: words_and_pause(0.1),
    "music": chords,
    "silence": lambda: np.zeros(RATE, np.float32),
}
STEPS = {
    "read a 48 kHz stereo WAV": read_file,
    "log-mel features": features,
    "log-mel features by transformers": features_of_transformers,
    "audio encoder (tiny)": encode,
}


if __name__ == "__main__":
    sys.exit(main())
