"""Audio clips of a conversation: samples, and mel features, which are computed once."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.prompt.media.audio import ArrivingAudio, Waveform
from qwen3_omni_neuron.prompt.media.log_mel import LogMelStream, MelSettings, log_mel, scaled


class Clip:
    """Complete audio clip.

    rate: sampling rate in Hz. The features of its end depend on the longest clip of the
    conversation, to which the reference pads it.
    """

    def __init__(self, waveform: Waveform, settings: MelSettings):
        self.rate = settings.rate
        self._waveform, self._settings = waveform, settings
        self._mel: tuple[int, Tensor] | None = None  # padded samples, features

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
        """The samples so far as the fields of an item of a message."""
        return {"audio": self.waveform, "sampling_rate": self.rate}

    def mel(self, padded_samples: int) -> Tensor:
        """Return the features, float32 [mel_bins, frames], for a longest clip of `padded_samples`.

        Raises AudioError if both are too short for one frame.
        """
        # Longer padding gives the same features: see LogMelStream.finish.
        padded = min(max(self.samples, padded_samples), self.samples + self._settings.n_fft + 1)
        if self._mel is None or self._mel[0] != padded:
            self._mel = padded, self._compute(padded)
        return self._mel[1]

    def _compute(self, padded_samples: int) -> Tensor:
        return log_mel(self._waveform, self._settings, padded_samples)


class GrowingClip(Clip):
    """Audio clip that arrives in pieces, whose features are computed as they arrive.

    sampling_rate: rate of the pieces in Hz. where: name of the clip in errors. limit_s: longest
    clip.
    """

    def __init__(
        self, sampling_rate: Any, settings: MelSettings, where: str, limit_s: float = math.inf
    ):
        super().__init__(np.empty(0, np.float32), settings)
        self._audio = ArrivingAudio(sampling_rate, settings.rate, where, limit_s)
        self._stream = LogMelStream(settings)
        self._pieces: list[Waveform] = []  # pieces after _waveform
        self._blocks: list[Tensor] = []  # unscaled frames

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return self._stream.samples

    @property
    def waveform(self) -> Waveform:
        """The samples so far, float32 [samples]."""
        self._waveform = np.concatenate((self._waveform, *self._pieces))
        self._pieces = []
        return self._waveform

    @property
    def begun(self) -> bool:
        """True where any piece had a sample."""
        return self._audio.begun

    @property
    def peak(self) -> float:
        """Largest value so far; see prompt.media.log_mel.LogMelStream."""
        return self._stream.peak

    def push(self, piece: Any, sampling_rate: Any) -> None:
        """Take the next piece; see prompt.media.audio.ArrivingAudio.push."""
        self._add(self._audio.push(piece, sampling_rate))

    def end(self) -> None:
        """End the clip: take the resampler's last samples.

        Raises AudioError, and ends nothing, if the clip is too short.
        """
        self._add(self._audio.finish())

    def complete_mel(self, frames: int) -> Tensor:
        """Return the features so far, in whole groups of `frames` frames.

        They are scaled with the peak so far: a later, louder part can change them.
        """
        mel = self._unscaled()
        return scaled(mel[:, : self.complete_frames(frames)].clone(), self._stream.peak)

    def complete_frames(self, frames: int) -> int:
        """Count the frames so far, in whole groups of `frames` frames."""
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
            empty = torch.empty(len(self._settings.filters), 0)
            self._blocks = [torch.cat([empty, *self._blocks], 1)]
        return self._blocks[0]

    def _compute(self, padded_samples: int) -> Tensor:
        end, peak = self._stream.finish(padded_samples)
        return scaled(torch.cat((*self._blocks, end), 1), peak)


def features(clips: Sequence[Clip], growing_frames: int | None = None) -> list[Tensor]:
    """Return the features of one conversation's clips, float32 [mel_bins, frames] each.

    growing_frames: given if the last clip is still arriving, whose features are then its whole
    groups of that many frames.
    """
    longest = max((clip.samples for clip in clips), default=0)
    if growing_frames is None:
        return [clip.mel(longest) for clip in clips]
    *whole, last = clips
    assert isinstance(last, GrowingClip)
    return [*(clip.mel(longest) for clip in whole), last.complete_mel(growing_frames)]
