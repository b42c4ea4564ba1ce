"""Log-mel features of audio clips, computed as the audio arrives.

Frames are computed in blocks of BLOCK_FRAMES from the clip's start, the last one zero-padded, so
that every frame is the same to the bit, however samples arrive. A later, louder part changes only
the floor that `scaled` applies.
Source: transformers WhisperFeatureExtractor.__call__ and _torch_extract_fbank_features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.checkpoint.json_files import check_served, whole_setting
from qwen3_omni_neuron.errors import AudioError, CheckpointError
from qwen3_omni_neuron.prompt.media.audio import ArrivingAudio, Waveform

BLOCK_FRAMES = 200  # 2 s, a quarter of an audio encoder's window: 0.4 ms of one core
_MOST_FFT, _MOST_BINS, _MOST_RATE = 4096, 1024, 192_000
MAX_HZ = 8000.0  # as in WhisperFeatureExtractor, at every sampling rate
# Slaney scale: 3 mels per 200 Hz up to 1000 Hz, then 27 mels per factor of 6.4.
_KNEE_HZ, _KNEE_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0
SILENCE = 1e-10  # lower bound of the power: log10 is -10 or more
RANGE = 8.0  # log10 units (80 dB) below the clip's peak: lower bound of the values


@dataclass(frozen=True, eq=False)
class MelSettings:
    """Settings of a checkpoint's mel features.

    n_fft: samples of a frame. hop: samples from frame to frame. filters: float32 [mel_bins, n_fft
    // 2 + 1]. rate: in Hz.
    """

    n_fft: int
    hop: int
    filters: Tensor
    rate: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "MelSettings":
        """Read preprocessor_config.json's settings. Raises CheckpointError."""
        check_served(settings, {"dither": 0.0, "padding_value": 0.0, "padding_side": "right"})
        n_fft = whole_setting(settings, "n_fft", 400, _MOST_FFT)
        hop = whole_setting(settings, "hop_length", 160, _MOST_FFT)
        if n_fft % 2 or n_fft // 2 <= hop:
            raise CheckpointError(
                f"preprocessor_config.json has n_fft {n_fft} and hop_length {hop}; an even n_fft "
                "above twice the hop_length is required."
            )
        rate = whole_setting(settings, "sampling_rate", 16000, _MOST_RATE)
        mel_bins = whole_setting(settings, "feature_size", 80, _MOST_BINS)
        filters = mel_filters(n_fft // 2 + 1, mel_bins, rate)
        return cls(n_fft, hop, torch.from_numpy(filters.astype(np.float32)), rate)

    def frames(self, samples: int, padded_samples: int) -> int:
        """Count a clip's frames when the longest clip of its request has padded_samples.

        The longest clip's last frame has only its mirrored end, and does not count: 330 samples are
        2 frames alone, and 3 beside a clip of 480.
        """
        return min(math.ceil(samples / self.hop), padded_samples // self.hop)


class LogMelStream:
    """Features of one clip, computed as samples arrive. peak: largest value so far."""

    def __init__(self, settings: MelSettings):
        self.samples, self.peak = 0, math.log10(SILENCE)
        self._settings = settings
        self._window = torch.hann_window(settings.n_fft, dtype=torch.float32)
        self._block_samples = (BLOCK_FRAMES - 1) * settings.hop + settings.n_fft
        self._frames = 0
        # Samples from the next frame's first on; before the first frame, all.
        self._held: list[Waveform] = []

    def push(self, samples: Waveform) -> Tensor:
        """Return the blocks of frames that these samples complete.

        float32 [mel_bins, n BLOCK_FRAMES]: log10 of the power, not yet `scaled`.
        """
        self.samples += len(samples)
        self._held.append(samples)
        last_middle = (self._frames + BLOCK_FRAMES - 1) * self._settings.hop
        if self.samples < last_middle + self._settings.n_fft // 2:
            return torch.empty(len(self._settings.filters), 0, dtype=torch.float32)
        tail = self._tail(0)
        blocks = 1 + (len(tail) - self._block_samples) // (BLOCK_FRAMES * self._settings.hop)
        mel = self._compute(tail, blocks * BLOCK_FRAMES)
        self.peak = max(self.peak, mel.max().item())
        self._frames += mel.shape[1]
        self._held = [tail[mel.shape[1] * self._settings.hop :].copy()]
        return mel

    def finish(self, padded_samples: int | None = None) -> tuple[Tensor, float]:
        """Return the remaining frames, as if the clip ended here, and the peak.

        padded_samples: length of the request's longest clip. The stream does not change.
        Raises AudioError for too few samples.
        """
        n_fft, hop = self._settings.n_fft, self._settings.hop
        padded, half = max(self.samples, padded_samples or 0), n_fft // 2
        if padded <= half:
            raise AudioError(
                f"{padded} samples are too few for features; {half + 1} is the minimum."
            )
        # Frames beyond n_fft zeros have no samples of the clip: dropped, and never the peak.
        zeros = min(padded - self.samples, n_fft)
        tail = self._tail(zeros)
        if self.samples + zeros == padded:
            tail = np.concatenate((tail, tail[-half - 1 : -1][::-1]))
        count = min((len(tail) - n_fft) // hop + 1, padded // hop - self._frames)
        if count <= 0:
            return torch.empty(len(self._settings.filters), 0, dtype=torch.float32), self.peak
        mel = self._compute(tail, count)
        kept = self._settings.frames(self.samples, padded) - self._frames
        return mel[:, :kept], max(self.peak, mel.max().item())

    def _tail(self, zeros: int) -> Waveform:
        """Return the samples from the next frame on, followed by zeros."""
        tail = np.concatenate((*self._held, np.zeros(zeros, np.float32)), dtype=np.float32)
        if self._frames:
            return tail
        # The first frame is centred on sample 0: mirror the samples after it.
        return np.concatenate((tail[self._settings.n_fft // 2 : 0 : -1], tail))

    def _compute(self, tail: Waveform, count: int) -> Tensor:
        n_fft, hop, filters = self._settings.n_fft, self._settings.hop, self._settings.filters
        mel = torch.empty(len(filters), count, dtype=torch.float32)
        for start in range(0, count, BLOCK_FRAMES):
            block = torch.zeros(self._block_samples, dtype=torch.float32)
            part = torch.from_numpy(tail[start * hop :][: self._block_samples])
            block[: len(part)] = part
            waves = torch.stft(
                block, n_fft, hop, window=self._window, center=False, return_complex=True
            )
            values = (filters @ waves.abs().square_()).clamp_(min=SILENCE).log10_()
            mel[:, start : start + BLOCK_FRAMES] = values[:, : count - start]
        return mel


def scaled(mel: Tensor, peak: float) -> Tensor:
    """Scale frames of a LogMelStream for the encoder, in place. peak: of the whole clip."""
    return mel.clamp_(min=peak - RANGE).add_(4.0).div_(4.0)


def log_mel(samples: Waveform, settings: MelSettings, padded_samples: int = 0) -> Tensor:
    """Compute the features of one clip, float32 [mel_bins, frames].

    samples: float32, at the extractor's rate. padded_samples: length of the request's longest clip.
    """
    padded = max(len(samples), padded_samples)
    stream = LogMelStream(settings)
    mel = torch.empty(
        len(settings.filters), settings.frames(len(samples), padded), dtype=torch.float32
    )
    block, end = 5 * BLOCK_FRAMES * settings.hop, 0
    for start in range(0, len(samples), block):
        frames = stream.push(samples[start : start + block])
        mel[:, end : end + frames.shape[1]] = frames
        end += frames.shape[1]
    mel[:, end:], peak = stream.finish(padded)
    return scaled(mel, peak)


def mel_filters(bins: int, mel_bins: int, rate: int) -> NDArray[np.float64]:
    """Compute triangular filters of equal area, float64 [mel_bins, bins].

    bins: frequencies from 0 to rate / 2.
    Source: transformers audio_utils.mel_filter_bank, with Slaney's norm and scale.
    """
    top_mels = _KNEE_MELS + np.log(MAX_HZ / _KNEE_HZ) / _LOG_STEP
    corners = _hertz(np.linspace(0.0, top_mels, mel_bins + 2))
    frequencies = np.linspace(0, rate // 2, bins)
    widths = np.diff(corners)[:, None]
    distances = corners[:, None] - frequencies
    rising, falling = -distances[:-2] / widths[:-1], distances[2:] / widths[1:]
    heights = 2.0 / (corners[2:] - corners[:-2])
    return np.maximum(0.0, np.minimum(rising, falling)) * heights[:, None]


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = 200.0 * mels / 3.0
    exponential = _KNEE_HZ * np.exp(_LOG_STEP * (mels - _KNEE_MELS))
    return np.where(mels < _KNEE_MELS, linear, exponential)


class Clip:
    """Complete audio clip. rate: in Hz.

    Its last features depend on the conversation's longest clip, to which the reference pads.
    """

    def __init__(self, waveform: Waveform, settings: MelSettings):
        self.rate = settings.rate
        self._waveform, self._settings = waveform, settings
        self._mel: tuple[int, Tensor] | None = None

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return len(self._waveform)

    @property
    def waveform(self) -> Waveform:
        """The samples so far, float32 [samples]."""
        return self._waveform

    @property
    def item(self) -> dict[str, Any]:
        """The samples so far as fields of a message's item."""
        return {"audio": self.waveform, "sampling_rate": self.rate}

    def mel(self, padded_samples: int) -> Tensor:
        """Return the features, float32 [mel_bins, frames], beside a clip of `padded_samples`.

        Raises AudioError if both are too short for one frame.
        """
        # Longer padding changes nothing: see LogMelStream.finish.
        padded = min(max(self.samples, padded_samples), self.samples + self._settings.n_fft + 1)
        if self._mel is None or self._mel[0] != padded:
            self._mel = padded, self._compute(padded)
        return self._mel[1]

    def _compute(self, padded_samples: int) -> Tensor:
        return log_mel(self._waveform, self._settings, padded_samples)


class GrowingClip(Clip):
    """Audio clip that arrives in pieces; see prompt.media.audio.ArrivingAudio."""

    def __init__(
        self, sampling_rate: Any, settings: MelSettings, where: str, limit_s: float = math.inf
    ):
        super().__init__(np.empty(0, np.float32), settings)
        self._audio = ArrivingAudio(sampling_rate, settings.rate, where, limit_s)
        self._stream = LogMelStream(settings)
        self._pieces: list[Waveform] = []
        self._blocks: list[Tensor] = []

    @property
    def samples(self) -> int:
        """See Clip.samples."""
        return self._stream.samples

    @property
    def waveform(self) -> Waveform:
        """See Clip.waveform."""
        self._waveform = np.concatenate((self._waveform, *self._pieces))
        self._pieces = []
        return self._waveform

    @property
    def begun(self) -> bool:
        """True if any piece had a sample."""
        return self._audio.begun

    @property
    def peak(self) -> float:
        """Largest value so far; see LogMelStream."""
        return self._stream.peak

    def push(self, piece: Any, sampling_rate: Any) -> None:
        """Append a piece; see prompt.media.audio.ArrivingAudio.push."""
        self._add(self._audio.push(piece, sampling_rate))

    def end(self) -> None:
        """End the clip. Raises AudioError if it is too short; it may then continue."""
        self._add(self._audio.finish())

    def complete_mel(self, frames: int) -> Tensor:
        """Return features in whole groups of `frames`, scaled with the peak so far."""
        mel = self._unscaled()
        return scaled(mel[:, : self.complete_frames(frames)].clone(), self._stream.peak)

    def complete_frames(self, frames: int) -> int:
        """Count the frames so far, in whole groups of `frames`."""
        there = sum(block.shape[1] for block in self._blocks)
        return there - there % frames

    def _add(self, samples: Waveform) -> None:
        if len(samples):
            self._pieces.append(samples)
            self._mel = None
            block = self._stream.push(samples)
            if block.shape[1]:
                self._blocks.append(block)

    def _unscaled(self) -> Tensor:
        if len(self._blocks) != 1:
            empty = torch.empty(len(self._settings.filters), 0, dtype=torch.float32)
            self._blocks = [torch.cat([empty, *self._blocks], 1)]
        return self._blocks[0]

    def _compute(self, padded_samples: int) -> Tensor:
        end, peak = self._stream.finish(padded_samples)
        return scaled(torch.cat((*self._blocks, end), 1), peak)


def features(clips: Sequence[Clip], growing_frames: int | None = None) -> list[Tensor]:
    """Return the features of a conversation's clips, float32 [mel_bins, frames] each.

    growing_frames: group size of the last clip's frames if it still arrives.
    """
    longest = max((clip.samples for clip in clips), default=0)
    if growing_frames is None:
        return [clip.mel(longest) for clip in clips]
    *whole, last = clips
    assert isinstance(last, GrowingClip)
    return [*(clip.mel(longest) for clip in whole), last.complete_mel(growing_frames)]
