"""An hour of sound to encoder rows: time and peak memory of each step, beside the library's own.

Each in a process of its own, over a tiny checkpoint. Beside our log-mel features stands
transformers' WhisperFeatureExtractor, which ours are equal to.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench.common.memory import peak_mb
from bench.common.results import publish, results_of

FILE_RATE = 48000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(STEPS[options.step](options.folder, options.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sound(Path(folder) / "sound.wav", options.seconds)
        rows = [{"step": s, **in_a_process(s, folder, options.seconds)} for s in STEPS]
    del options.step, options.folder  # of the processes
    summary: dict[str, Any] = {row["step"]: row["peak_mb"] for row in rows}
    publish(results_of("long_audio", arguments, options, rows, summary), options.json)


def in_a_process(step: str, folder: str, seconds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.long_audio", "--step", step, "--folder", folder]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def write_sound(path: Path, seconds: int) -> None:
    """Noise, 48 kHz stereo, 16 bits."""
    second = np.random.default_rng(0).uniform(-0.3, 0.3, (FILE_RATE, 2)).astype(np.float32)
    with soundfile.SoundFile(path, "w", FILE_RATE, 2) as file:
        for _ in range(seconds):
            file.write(second)


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and megabytes of memory at the peak above those before, the result included."""
    before, start = peak_mb(), time.perf_counter()
    result = work()
    taken = {"time_s": time.perf_counter() - start, "peak_mb": peak_mb() - before}
    return {**taken, "result_mb": result.nbytes / 2**20}


def read_file(folder: Path, seconds: int) -> dict[str, float]:
    from qwen3_omni_neuron.conversation.media.audio import load_waveform

    return measured(lambda: load_waveform({"audio": folder / "sound.wav"}, 16000, "sound"))


def features(folder: Path, seconds: int) -> dict[str, float]:
    from qwen3_omni_neuron.conversation.media.log_mel import MelSettings, log_mel

    settings = MelSettings.of(extractor(folder))
    waveform = noise(seconds)
    return measured(lambda: log_mel([waveform], settings)[0])


def features_of_transformers(folder: Path, seconds: int) -> dict[str, float]:
    made, waveform = extractor(folder), noise(seconds)
    options = {"sampling_rate": 16000, "padding": True, "truncation": False}
    return measured(lambda: made([waveform], return_tensors="np", **options)["input_features"])


def encode(folder: Path, seconds: int) -> dict[str, float]:
    import torch

    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.modules import load_models
    from qwen3_omni_neuron.cpu.encoders import CpuAudio

    checkpoint = tiny_checkpoint(folder)
    models = load_models(
        Checkpoint(checkpoint), read_config(checkpoint), torch.float32, ("thinker",)
    )
    assert models.audio_encoder is not None
    audio, mel = CpuAudio(models.audio_encoder), torch.rand(128, 100 * seconds)
    with torch.inference_mode():
        return measured(lambda: audio.encode([mel]))


def noise(seconds: int) -> np.ndarray:
    # In float32 from the start: a larger peak before the measured work would hide that of it.
    return np.random.default_rng(0).random(16000 * seconds, dtype=np.float32) * np.float32(0.3)


def tiny_checkpoint(folder: Path) -> Path:
    from qwen3_omni_neuron.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(folder / "checkpoint")


def extractor(folder: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(tiny_checkpoint(folder))


STEPS = {
    "read a 48 kHz stereo WAV": read_file,
    "log-mel features": features,
    "log-mel features by transformers": features_of_transformers,
    "audio encoder (tiny)": encode,
}


if __name__ == "__main__":
    main()
