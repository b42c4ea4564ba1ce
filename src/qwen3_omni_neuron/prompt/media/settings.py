"""Settings of a checkpoint for a process that only decodes media."""

from dataclasses import dataclass

from qwen3_omni_neuron.prompt.media.sizes import Sizes


@dataclass(frozen=True)
class MediaSettings:
    """Settings of a checkpoint for decoding media.

    audio_rate: sampling rate in Hz. audio_tokens_per_s: number of tokens of a second of audio.
    sizes: sizes to which images and frames are resized.
    """

    audio_rate: int
    audio_tokens_per_s: float
    sizes: Sizes

    def longest_audio_s(self, most_tokens: int | None) -> float:
        """Return the length of audio with `most_tokens` tokens; None: any number."""
        return float("inf") if most_tokens is None else most_tokens / self.audio_tokens_per_s
