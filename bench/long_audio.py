"""One hour of audio to encoder rows: time and peak memory of each step, beside transformers' own.

    python -m bench.long_audio --json result.json

Each step runs in a process of its own, over a tiny checkpoint. transformers'
WhisperFeatureExtractor, whose features are equal to ours, is measured beside ours.
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
from transformers import WhisperFeatureExtractor

from bench.common.measure import in_new_process
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.tiny import write_tiny_checkpoint
from qwen3_omni_neuron.cpu.encoders import CpuAudio
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel
from testing.command_line import Figures, Row, parser_of, run
from testing.memory import peak_mb
from testing.models import load_models

FILE_RATE = 48000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("long_audio", __doc__)
    parser.add_argument("--seconds", type=int, default=3600)
    return run("long_audio", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every step: a row for each. The summary has their peaks."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), options.seconds
        write_audio(folder / "audio.wav", seconds)
        for step, function in STEPS.items():
            rows.append({"step": step, **in_new_process(function, folder, seconds)})
    return rows, {row["step"]: row["peak_mb"] for row in rows}


def write_audio(path: Path, seconds: int) -> None:
    """Write noise, 48 kHz stereo, 16 bits."""
    second = np.random.default_rng(0).uniform(-0.3, 0.3, (FILE_RATE, 2)).astype(np.float32)
    with soundfile.SoundFile(path, "w", FILE_RATE, 2) as file:
        for _ in range(seconds):
            file.write(second)


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
    return WhisperFeatureExtractor.from_pretrained(write_tiny_checkpoint(folder / "checkpoint"))


STEPS = {
    "read a 48 kHz stereo WAV": read_file,
    "log-mel features": features,
    "log-mel features by transformers": features_of_transformers,
    "audio encoder (tiny)": encode,
}


if __name__ == "__main__":
    sys.exit(main())
