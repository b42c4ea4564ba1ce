"""Log-mel features, made as the sound comes.

A clip of an hour takes the memory of its features and of a block. Frames are finished 200 samples
after their middle; what a later, louder part changes is the floor alone (`scaled`).
Source: transformers WhisperFeatureExtractor.__call__ and _torch_extract_fbank_features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.media.audio import Waveform
from qwen3_omni_neuron.errors import AudioError, CheckpointError

BLOCK_FRAMES = 1000  # of `log_mel`: 10 s, about 8 MiB on the way through the transform
SILENCE = 1e-10  # power below it counts as it, so that no frame is below log10(1e-10) = -10
RANGE = 8.0  # in log10 units (80 dB): what is further below the clip's peak is lifted to there


@dataclass(frozen=True, eq=False)
class MelSettings:
    """How a checkpoint's features are made.

    n_fft: samples a frame sees. hop: samples from one frame to the next. filters: float32
    [mel_bins, n_fft // 2 + 1].
    """

    n_fft: int
    hop: int
    filters: Tensor

    @classmethod
    def of(cls, extractor: Any) -> "MelSettings":
        """Those of a WhisperFeatureExtractor. Raises CheckpointError when one isn't served."""
        for name, served in (("dither", 0.0), ("padding_value", 0.0), ("padding_side", "right")):
            value = getattr(extractor, name, served)
            if value != served:
                raise CheckpointError(
                    f"preprocessor_config.json has {name} {value!r}; {served!r} alone is served."
                )
        n_fft, hop = extractor.n_fft, extractor.hop_length
        if n_fft % 2 or n_fft // 2 <= hop:
            raise CheckpointError(
                f"preprocessor_config.json has n_fft {n_fft} and hop_length {hop}; an even n_fft "
                "of more than twice the hop_length is served."
            )
        filters = torch.from_numpy(np.asarray(extractor.mel_filters, np.float32).T.copy())
        return cls(n_fft, hop, filters)

    def frames(self, samples: int, padded_samples: int) -> int:
        """Frames of a clip of `samples` when the longest of its request has padded_samples.

        They begin inside the clip, and the longest's last one, which sees the end's mirror image
        alone, is none: 330 samples are 2 frames alone, and 3 beside a clip of 480.
        """
        return min(math.ceil(samples / self.hop), padded_samples // self.hop)


class LogMelStream:
    """One clip's features as its samples arrive. Not for more than one thread.

    `peak`: the largest value so far, of all frames that the reference takes it from.
    Working memory grows with what is pushed at once: push blocks.
    """

    def __init__(self, settings: MelSettings):
        self.peak = math.log10(SILENCE)
        self._settings = settings
        self._window = torch.hann_window(settings.n_fft)
        self._samples = 0  # of the clip
        self._frames = 0  # given
        # What the next frame begins with. Until the first is begun, the clip from its beginning.
        self._tail = np.empty(0, np.float32)

    def push(self, samples: Waveform) -> Tensor:
        """Take the next samples [any number]; float32 [mel_bins, n] of the frames they finish.

        Values are log10 of the power, 0 dB at 0.0, not yet `scaled`.
        """
        self._samples += len(samples)
        self._extend(samples)
        return self._finished()

    def finish(self, padded_samples: int | None = None) -> Tensor:
        """The clip's last frames, as `push` gives them.

        padded_samples: length of the longest clip of the request, to which the reference pads
        this one with zeros; its own if None. Raises AudioError where that is too short.
        """
        padded = max(self._samples, padded_samples or 0)
        half = self._settings.n_fft // 2
        if padded <= half:
            raise AudioError(f"{padded} samples are too few for features; {half + 1} is the least.")
        kept = self._settings.frames(self._samples, padded) - self._frames
        # Frames beyond n_fft zeros hold nothing of the clip: none is kept, none is the peak.
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
        """Frames that lie in the tail whole, as far as frame `end`, and the peak with them."""
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
    """Frames of a LogMelStream as the encoder takes them, changed in place.

    peak: that of the whole clip. Values below peak - 8 are lifted to it; then 4 is added, and the
    sum divided by 4.
    """
    return mel.clamp_(min=peak - RANGE).add_(4.0).div_(4.0)


def log_mel(waveforms: Sequence[Waveform], settings: MelSettings) -> list[Tensor]:
    """Features of one request's clips, float32 [mel_bins, frames] each.

    waveforms: float32 [samples], at the extractor's rate. Equal what the extractor makes of them
    in one call with padding=True, where its attention mask is true.
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
