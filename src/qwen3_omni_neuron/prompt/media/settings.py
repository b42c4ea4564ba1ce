"""Settings of a checkpoint that a process which only decodes has to know."""

from dataclasses import dataclass

from qwen3_omni_neuron.prompt.media.sizes import Sizes


@dataclass(frozen=True)
class MediaSettings:
    """Settings of a checkpoint that media are decoded by.

    audio_rate: in Hz. audio_tokens_per_s: tokens that a second of audio becomes. sizes: those that
    images and frames are resized to.
    """

    audio_rate: int
    audio_tokens_per_s: float
    sizes: Sizes

    def longest_audio_s(self, most_tokens: int | None) -> float:
        """Return the length of the audio that becomes so many tokens; None: any number."""
        return float("inf") if most_tokens is None else most_tokens / self.audio_tokens_per_s
