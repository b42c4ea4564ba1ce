"""Rope positions over three axes (time, height, width).

Text and sound count their tokens on all three alike. A picture's tokens lie where its rows and
columns are, a video's frames also where their times are, which need not be whole numbers. What
follows goes on after the highest of them.

Source: transformers get_rope_index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MediaRun:
    """The tokens of a clip, an image or a video.

    audio_tokens: of its sound. grid: frames, rows and columns of tokens of what is to be seen.
    frame_positions: from one frame to the next, along the time axis. Of a video with sound the two
    kinds of tokens lie between each other, by time.
    """

    audio_tokens: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    frame_positions: float = 0.0

    @property
    def vision_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    def __len__(self) -> int:
        return self.vision_tokens + self.audio_tokens

    def is_sound(self) -> Tensor:
        """bool [len(self)]: which tokens are of its sound. A frame comes before the sound of the
        same time."""
        frames, rows, columns = self.grid
        frame_times = torch.arange(frames, dtype=torch.float64) * self.frame_positions
        sound_times = torch.arange(self.audio_tokens, dtype=torch.float64)
        times = torch.cat((frame_times.repeat_interleave(rows * columns), sound_times))
        return times.argsort(stable=True) >= self.vision_tokens

    def positions(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [3, len(self)], and the position of what follows. first: the position that it
        begins at, float32 []."""
        frames, rows, columns = self.grid
        times, *places = (torch.arange(n).float() for n in (frames, rows, columns))
        axes = torch.meshgrid(times * self.frame_positions, *places, indexing="ij")
        vision = torch.stack([axis.flatten() for axis in axes])
        is_sound = self.is_sound()
        positions = torch.empty(3, len(self))
        positions[:, ~is_sound] = vision + first
        positions[:, is_sound] = torch.arange(self.audio_tokens) + first
        # The reference goes on after the highest position of what is left of the one kind when the
        # other has ended: not after the highest of all.
        other = (is_sound != is_sound[-1]).nonzero()
        tail = int(other[-1]) + 1 if len(other) else 0
        return positions, positions[:, tail:].max() + 1


Placed = tuple[int, MediaRun]
"""The index of a run's first token in a prompt, and the run."""


def rope_positions(length: int, runs: Iterable[Placed] = ()) -> Tensor:
    """float32 [3, length] of a prompt. runs: its media, in order."""
    positions = torch.empty(3, length)
    at, following = 0, torch.zeros(())
    for start, run in runs:
        positions[:, at:start] = following + torch.arange(start - at)
        following = following + (start - at)
        at = start + len(run)
        positions[:, start:at], following = run.positions(following)
    positions[:, at:] = following + torch.arange(length - at)
    return positions


def talker_positions(user_tokens: Tensor, rows: int, runs: Sequence[Placed]) -> Tensor:
    """float32 [3, rows] of a talker prompt.

    user_tokens: int64 [U], indices of the prompt's tokens in user segments, which hold all `runs`;
    rows: U and those of the assistant's turn.
    """
    kept = []
    for index, (start, run) in enumerate(runs):
        # The reference doesn't tell the talker that there is sound in a video. It finds such a
        # video still where a picture without sound is to come, and else takes it for text.
        silent_to_come = any(r.vision_tokens and not r.audio_tokens for _, r in runs[index + 1 :])
        if not run.audio_tokens or silent_to_come:
            kept.append((int(torch.searchsorted(user_tokens, start)), run))
    return rope_positions(rows, kept)
