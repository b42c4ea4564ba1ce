"""Log-mel features, computed as the audio arrives.

A clip of an hour takes the memory of its features and of one block. A frame is complete 200 samples
after its middle; a later, louder part of the clip changes only the floor that `scaled` applies.
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

from qwen3_omni_neuron.conversation.media.audio import Waveform
from qwen3_omni_neuron.conversation.preprocessor import check_served, whole_setting
from qwen3_omni_neuron.errors import AudioError, CheckpointError

BLOCK_FRAMES = 1000  # in a block of `log_mel`: 10 s, about 8 MiB during the transform
MAX_HZ = 8000.0  # WhisperFeatureExtractor sets it, for every sampling rate
# The Slaney scale: 3 mels for 200 Hz up to 1000 Hz, above it 27 mels for a factor of 6.4.
_KNEE_HZ, _KNEE_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0
SILENCE = 1e-10  # least power: smaller ones are raised to it, so that log10 is -10 or more
RANGE = 8.0  # in log10 units (80 dB): values further below the clip's peak are raised to there


@dataclass(frozen=True, eq=False)
class MelSettings:
    """Settings of a checkpoint's mel features.

    n_fft: samples of one frame. hop: samples from one frame to the next. filters: float32
    [mel_bins, n_fft // 2 + 1]. rate: Hz.
    """

    n_fft: int
    hop: int
    filters: Tensor
    rate: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "MelSettings":
        """Read those of a preprocessor_config.json, with the defaults of transformers.

        Raises CheckpointError for settings that aren't supported.
        """
        check_served(settings, {"dither": 0.0, "padding_value": 0.0, "padding_side": "right"})
        n_fft = whole_setting(settings, "n_fft", 400)
        hop = whole_setting(settings, "hop_length", 160)
        if n_fft % 2 or n_fft // 2 <= hop:
            raise CheckpointError(
                f"preprocessor_config.json has n_fft {n_fft} and hop_length {hop}; an even n_fft "
                "of more than twice the hop_length is served."
            )
        rate = whole_setting(settings, "sampling_rate", 16000)
        filters = mel_filters(n_fft // 2 + 1, whole_setting(settings, "feature_size", 80), rate)
        return cls(n_fft, hop, torch.from_numpy(filters.astype(np.float32)), rate)

    def frames(self, samples: int, padded_samples: int) -> int:
        """Count the frames of a clip when the longest clip of its request has padded_samples.

        Every frame begins inside its clip. The last one of the longest clip, made of the end's
        mirror image only, does not count: 330 samples are 2 frames alone, and 3 in a request with
        a clip of 480.
        """
        return min(math.ceil(samples / self.hop), padded_samples // self.hop)


class LogMelStream:
    """Features of one clip, computed as its samples arrive. For one thread.

    peak: largest value so far, over the frames that the reference takes it from.
    Working memory grows with what is pushed at once: push blocks.
    """

    def __init__(self, settings: MelSettings):
        self.peak = math.log10(SILENCE)
        self._settings = settings
        self._window = torch.hann_window(settings.n_fft)
        self._samples = 0  # pushed so far
        self._frames = 0  # returned so far
        # Samples from the next frame's first one on; before there is any frame, all samples.
        self._tail = np.empty(0, np.float32)

    def push(self, samples: Waveform) -> Tensor:
        """Take the next samples, any number; return the frames that they complete.

        Returns float32 [mel_bins, n]: log10 of the power, 0 dB at 0.0, not yet `scaled`.
        """
        self._samples += len(samples)
        self._extend(samples)
        return self._finished()

    def finish(self, padded_samples: int | None = None) -> Tensor:
        """Return the clip's last frames, as `push` does.

        padded_samples: length of the longest clip of the request, to which the reference pads
        this one with zeros; None: this clip's own. Raises AudioError where that is too short.
        """
        padded = max(self._samples, padded_samples or 0)
        half = self._settings.n_fft // 2
        if padded <= half:
            raise AudioError(f"{padded} samples are too few for features; {half + 1} is the least.")
        kept = self._settings.frames(self._samples, padded) - self._frames
        # Frames beyond n_fft zeros hold none of the clip's samples: not kept, and never the peak.
        zeros = min(padded - self._samples, self._settings.n_fft)
        self._extend(np.zeros(zeros, np.float32))
        if self._samples + zeros == padded:
            self._extend(self._tail[-half - 1 : -1][::-1])
        return self._finished(padded // self._settings.hop)[:, :kept]

    def _extend(self, samples: Waveform) -> None:
        begun = len(self._tail) > self._settings.n_fft // 2
        self._tail = np.concatenate((self._tail, samples), dtype=np.float32)
        half = self._settings.n_fft // 2
        if not begun and len(self._tail) > half:
            # The first frame's middle is sample 0: before it, the mirror image of what is after.
            self._tail = np.concatenate((self._tail[half:0:-1], self._tail))

    def _finished(self, end: int | None = None) -> Tensor:
        """Return the frames that the tail has whole, up to frame `end`; update the peak."""
        n_fft, hop = self._settings.n_fft, self._settings.hop
        count = max(0, (len(self._tail) - n_fft) // hop + 1)
        if end is not None:
            count = min(count, end - self._frames)
        if count <= 0:
            return torch.empty(len(self._settings.filters), 0)
        block = torch.from_numpy(self._tail[: (count - 1) * hop + n_fft])
        waves = torch.stft(
            block, n_fft, hop, window=self._window, center=False, return_complex=True
        )
        mel = (self._settings.filters @ waves.abs().square_()).clamp_(min=SILENCE).log10_()
        self.peak = max(self.peak, mel.max().item())
        self._tail = self._tail[count * hop :]
        self._frames += count
        return mel


def scaled(mel: Tensor, peak: float) -> Tensor:
    """Scale frames of a LogMelStream for the encoder, in place.

    peak: that of the whole clip. Values below peak - 8 are raised to peak - 8; then 4 is added,
    and the sum divided by 4.
    """
    return mel.clamp_(min=peak - RANGE).add_(4.0).div_(4.0)


def log_mel(waveforms: Sequence[Waveform], settings: MelSettings) -> list[Tensor]:
    """Compute the features of one request's clips, float32 [mel_bins, frames] each.

    waveforms: float32 [samples], at the extractor's rate. The features are those that the
    extractor gives in one call with padding=True, where its attention mask is true.
    """
    padded = max((len(samples) for samples in waveforms), default=0)
    return [_log_mel(samples, padded, settings) for samples in waveforms]


def _log_mel(samples: Waveform, padded: int, settings: MelSettings) -> Tensor:
    stream = LogMelStream(settings)
    mel = torch.empty(len(settings.filters), settings.frames(len(samples), padded))
    block, end = BLOCK_FRAMES * settings.hop, 0
    for start in range(0, len(samples), block):
        frames = stream.push(samples[start : start + block])
        mel[:, end : end + frames.shape[1]] = frames
        end += frames.shape[1]
    mel[:, end:] = stream.finish(padded)
    return scaled(mel, stream.peak)


def mel_filters(bins: int, mel_bins: int, rate: int) -> NDArray[np.float64]:
    """Compute triangular filters of equal area, float64 [mel_bins, bins].

    bins: frequencies of the transform, from 0 to rate / 2.
    Source: transformers audio_utils.mel_filter_bank, with the norm and the scale of Slaney.
    """
    top_mels = _KNEE_MELS + np.log(MAX_HZ / _KNEE_HZ) / _LOG_STEP
    corners = _hertz(np.linspace(0.0, top_mels, mel_bins + 2))
    frequencies = np.linspace(0, rate // 2, bins)
    widths = np.diff(corners)[:, None]
    distances = corners[:, None] - frequencies  # [mel_bins + 2, bins]
    rising, falling = -distances[:-2] / widths[:-1], distances[2:] / widths[1:]
    heights = 2.0 / (corners[2:] - corners[:-2])
    return np.maximum(0.0, np.minimum(rising, falling)) * heights[:, None]


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = 200.0 * mels / 3.0
    exponential = _KNEE_HZ * np.exp(_LOG_STEP * (mels - _KNEE_MELS))
    return np.where(mels < _KNEE_MELS, linear, exponential)
