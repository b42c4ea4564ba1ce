"""Prompt of a conversation: token ids, positions, mel features and patches."""

from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches in a frame."""


@dataclass(frozen=True)
class Patches:
    """Patches of an image or a video for the vision encoder.

    values: float32 [frames * rows * columns, patch_values], frame by frame, and inside a frame in
    blocks of merge_size x merge_size patches.
    """

    values: Tensor
    grid: Grid


@dataclass(frozen=True)
class TalkerPrompt:
    """Part of a prompt that the talker reads.

    token_ids: int64 [U], the tokens of user segments. positions: float32 [3, U + 9], the rope
    positions of those and of the assistant rows that follow (see model.talker).
    """

    token_ids: Tensor
    positions: Tensor

    def __len__(self) -> int:
        """Count the rows of the whole talker prompt, including the first generated token's."""
        return int(self.positions.shape[1])


@dataclass(frozen=True)
class Prompt:
    """Model inputs of one conversation.

    token_ids: int64 [S], media as runs of their placeholders. positions: float32 [3, S], the rope
    positions over time, height and width. audio_mel: float32 [mel_bins, frames] for each audio clip
    and each video's audio; images, videos: their patches. Each is in the order of the placeholders
    in token_ids. audio_tokens, image_tokens: how many of token_ids are of audio, and of images and
    videos.
    """

    token_ids: Tensor
    positions: Tensor
    talker: TalkerPrompt
    audio_mel: tuple[Tensor, ...] = ()
    images: tuple[Patches, ...] = ()
    videos: tuple[Patches, ...] = ()
    audio_tokens: int = 0
    image_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)
