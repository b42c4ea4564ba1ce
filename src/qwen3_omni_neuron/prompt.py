"""What a conversation becomes before any model sees it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One conversation as model inputs.

    token_ids: int64 [S], media as runs of their placeholder. positions: int64 [3, S], the rope
    positions over time, height and width. audio_mel: float32 [mel_bins, frames], one a clip, in
    the order of the clips in token_ids.
    """

    token_ids: Tensor
    positions: Tensor
    audio_mel: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)
