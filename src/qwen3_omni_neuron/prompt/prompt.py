"""Prompt of a conversation: token ids, positions, mel features and pixels."""

from dataclasses import dataclass

from torch import Tensor

from qwen3_omni_neuron.prompt.media.pixels import Visual


@dataclass(frozen=True)
class TalkerPrompt:
    """Part of a prompt that the talker reads.

    token_ids: int64 [U], the tokens of user segments. positions: float32 [3, U + 9], the rope
    positions of these tokens and of the assistant rows after them (see model.talker).
    """

    token_ids: Tensor
    positions: Tensor

    def __len__(self) -> int:
        """Count the rows of the whole talker prompt, with that of the first generated token."""
        return int(self.positions.shape[1])

    def first(self, rows: int) -> "TalkerPrompt":
        """Return the prompt of the first user rows, as it is while later ones are not known yet."""
        assistant = len(self) - len(self.token_ids)
        return TalkerPrompt(self.token_ids[:rows], self.positions[:, : rows + assistant])


@dataclass(frozen=True)
class Prompt:
    """Model inputs of one conversation.

    token_ids: int64 [S], with media as runs of their placeholders. positions: float32 [3, S], the
    rope positions over time, height and width. audio_mel: float32 [mel_bins, frames] for each audio
    clip and each video's audio. images, videos: their pixels. Each is in the order of the
    placeholders in token_ids. audio_tokens, image_tokens: number of token_ids of audio, and of
    images and videos. warnings: see prompt.media.fields.Warn.
    """

    token_ids: Tensor
    positions: Tensor
    talker: TalkerPrompt
    audio_mel: tuple[Tensor, ...] = ()
    images: tuple[Visual, ...] = ()
    videos: tuple[Visual, ...] = ()
    audio_tokens: int = 0
    image_tokens: int = 0
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)
