"""What a conversation becomes before any model sees it."""

from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches in each."""


@dataclass(frozen=True)
class Patches:
    """An image, or a video, cut up for the vision encoder.

    values: float32 [frames * rows * columns, patch_values], frame by frame, within a frame in
    blocks of merge_size x merge_size patches.
    """

    values: Tensor
    grid: Grid


@dataclass(frozen=True)
class TalkerPrompt:
    """What the talker reads of a prompt.

    token_ids: int64 [U], the tokens of its user segments. positions: float32 [3, U + 9], the rope
    positions of those and of the assistant rows that follow (see model.talker_prompt).
    """

    token_ids: Tensor
    positions: Tensor

    def __len__(self) -> int:
        """Rows of the whole talker prompt, the first generated token's included."""
        return int(self.positions.shape[1])


@dataclass(frozen=True)
class Prompt:
    """One conversation as model inputs.

    token_ids: int64 [S], media as runs of their placeholders. positions: float32 [3, S], the rope
    positions over time, height and width. audio_mel: float32 [mel_bins, frames] a clip, a video's
    own sound included; images, videos: their patches. Each in the order of its placeholders in
    token_ids.
    """

    token_ids: Tensor
    positions: Tensor
    talker: TalkerPrompt
    audio_mel: tuple[Tensor, ...] = ()
    images: tuple[Patches, ...] = ()
    videos: tuple[Patches, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)
