"""Audio at any length: windows while a clip arrives, and long ones in the memory of their rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.model.audio_encoder import window_batches
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.log_mel import LogMelStream, MelSettings, log_mel, scaled
from testing.repeats import RUNS_ALL

RATE = 16000
SECONDS = 36.1  # four windows, and one of 4.1 s whose last chunk is of 0.1 s


@pytest.fixture(scope="module")
def settings(checkpoint) -> MelSettings:
    return MelSettings.of(WhisperFeatureExtractor.from_pretrained(checkpoint).to_dict())


class Arriving:
    """Encodes each window of a clip as soon as its last frame is there, by the peak until then."""

    def __init__(self, models: Models, config: OmniConfig, settings: MelSettings):
        self.encoder, self.config = models.audio_encoder, config.thinker.audio
        self.stream = LogMelStream(settings)
        self.frames = torch.empty(config.thinker.audio.mel_bins, 0)
        self.windows: list[Tensor] = []  # log10, not yet scaled
        self.peaks: list[float] = []  # by which each was encoded
        self.rows: list[Tensor] = []

    def push(self, samples: np.ndarray) -> None:
        self._take(self.stream.push(samples))

    def finish(self) -> list[int]:
        """Encode the last window, and those anew whose values a later peak changed: which."""
        frames, peak = self.stream.finish()
        self._take(frames)
        if self.frames.shape[1]:
            self._encode(self.frames, peak)
        anew = []
        for index, (window, before) in enumerate(zip(self.windows, self.peaks, strict=True)):
            now = scaled(window.clone(), peak)
            if not torch.equal(scaled(window.clone(), before), now):
                self.rows[index] = self._rows(now)
                anew.append(index)
        return anew

    def _take(self, frames: Tensor) -> None:
        self.frames = torch.cat((self.frames, frames), 1)
        while self.frames.shape[1] >= self.config.window_mel_frames:
            self._encode(self.frames[:, : self.config.window_mel_frames], self.stream.peak)
            self.frames = self.frames[:, self.config.window_mel_frames :]

    def _encode(self, window: Tensor, peak: float) -> None:
        self.windows.append(window)
        self.peaks.append(peak)
        self.rows.append(self._rows(scaled(window.clone(), peak)))

    def _rows(self, mel: Tensor) -> Tensor:
        (batch,) = window_batches([mel], self.config, 1)
        # The clip is of more than 1 s, whatever its last window is.
        return self.encoder(batch.mel, batch.valid, self.config.chunk_mel_frames)[batch.valid]


def clip(levels: dict[float, float]) -> np.ndarray:
    """Noise of a level (in dB) from a time (in seconds) on, until the next."""
    noise = np.random.default_rng(2).uniform(-1, 1, round(SECONDS * RATE))
    for start_s, level in levels.items():
        noise[round(start_s * RATE) :] *= 10 ** (level / 20)
    return noise.astype(np.float32)


@torch.no_grad()
def test_windows_encoded_while_a_clip_arrives_are_those_of_the_whole_clip(
    models, config, settings
) -> None:
    for levels, expected in (
        # The loudest comes first: all windows are right, though all are under the floor in part.
        ({0: -90, 1: 90, 2: -90}, []),
        # The loudest comes in the third, but no value before it is 80 dB below.
        ({0: -10, 20: 10, 21: -10}, []),
        # It does, and the first two had a lower floor than it sets.
        ({0: -90, 20: 90, 21: -90}, [0, 1]),
        # Louder twice, the second time in the last window, which is encoded at the end.
        ({0: -90, 1: 70, 2: -70, 35: 90}, [0, 1, 2, 3]),
        # The first two are loud enough for a louder one, those between are not.
        ({0: -10, 16: -80, 35: 90}, [2, 3]),
    ):
        for block in (1600, 50_000):
            samples = clip(levels)
            whole = [log_mel(samples, settings)]
            batches = window_batches(whole, config.thinker.audio, 8)
            rows = torch.cat([models.audio_encoder(*batch)[batch.valid] for batch in batches])
            arriving = Arriving(models, config, settings)
            for start in range(0, len(samples), block):
                arriving.push(samples[start : start + block])
                ready = max(0, (min(start + block, len(samples)) - 200) // 160 + 1) // 800
                assert len(arriving.rows) == ready, "a window waits for its own frames alone"
            early = torch.cat(arriving.rows)
            assert arriving.finish() == expected
            torch.testing.assert_close(torch.cat(arriving.rows), rows, atol=1e-5, rtol=1e-5)
            off = [
                (early[i : i + 104] - rows[i : i + 104]).abs().max()
                for i in range(0, len(early), 104)
            ]
            assert [i for i, difference in enumerate(off) if difference > 1e-3] == expected


A_LONG_CLIP = """
import sys
from pathlib import Path
import numpy as np, torch
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from testing.models import load_models
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel
from qwen3_omni_neuron.cpu.encoders import CpuAudio

torch.set_num_threads(1)

def peak_mb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

def sound(seconds):
    ten = np.random.default_rng(0).uniform(-0.3, 0.3, 160_000).astype(np.float32)
    for _ in range(seconds // 10):
        yield ten

def encode(seconds):
    item = {"audio": sound(seconds), "sampling_rate": 16000}
    waveform = load_waveform(item, 16000, "hour", limit_s=3600.0)
    mel = log_mel(waveform, settings)
    rows = CpuAudio(models.audio_encoder).encode([mel])
    assert rows.isfinite().all() and len(rows) == config.thinker.audio.tokens(mel.shape[1])
    return rows, (waveform.nbytes + mel.nbytes + rows.nbytes) / 2**20

config = read_config(Path(sys.argv[1]))
models = load_models(Checkpoint(Path(sys.argv[1])), config, torch.float32)
settings = MelSettings(400, 160, torch.rand(128, 201), 16000)
with torch.inference_mode():
    encode(40)
    before = peak_mb()
    rows, results_mb = encode(int(sys.argv[2]))
print(len(rows), results_mb, peak_mb() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_long_clip_streams_through_in_the_memory_of_its_results(checkpoint) -> None:
    """An hour with make test-all. In a process whose peak is its own, after a short clip there."""
    seconds = 3600 if RUNS_ALL else 900
    done = subprocess.run(
        [sys.executable, "-c", A_LONG_CLIP, str(checkpoint), str(seconds)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens, results_mb, grown_mb = map(float, done.stdout.split())
    assert tokens == 13 * seconds
    of_an_hour_mb = 219.7 + 175.8 + 11.4  # samples, mel frames and rows
    assert results_mb == pytest.approx(of_an_hour_mb * seconds / 3600, abs=0.5)
    assert grown_mb < results_mb + 60
