"""Rope positions over three axes (time, height, width).

Text and sound count their tokens on all three alike. A picture's tokens lie where its rows and
columns are, a video's frames also where their times are, which need not be whole numbers. What
follows goes on after the highest of them.

In numpy, as all that is read on the way to a prompt: requests are read while stages run, and each
operation of torch would let go of the interpreter and wait for it.
Source: transformers get_rope_index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
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

    def is_sound(self) -> NDArray[np.bool_]:
        """bool [len(self)]: which tokens are of its sound. A frame comes before the sound of the
        same time."""
        frames, rows, columns = self.grid
        frame_times = np.arange(frames) * self.frame_positions
        times = np.concatenate((frame_times.repeat(rows * columns), np.arange(self.audio_tokens)))
        return times.argsort(kind="stable") >= self.vision_tokens

    def positions(self, first: np.float32) -> tuple[NDArray[np.float32], np.float32]:
        """float32 [3, len(self)], and the position of what follows. first: the position that it
        begins at."""
        times, *places = (np.arange(n, dtype=np.float32) for n in self.grid)
        axes = np.meshgrid(times * np.float32(self.frame_positions), *places, indexing="ij")
        vision = np.stack([axis.ravel() for axis in axes])
        is_sound = self.is_sound()
        positions = np.empty((3, len(self)), dtype=np.float32)
        positions[:, ~is_sound] = vision + first
        positions[:, is_sound] = np.arange(self.audio_tokens, dtype=np.float32) + first
        # The reference goes on after the highest position of what is left of the one kind when the
        # other has ended: not after the highest of all.
        (other,) = (is_sound != is_sound[-1]).nonzero()
        tail = other[-1] + 1 if len(other) else 0
        return positions, positions[:, tail:].max() + np.float32(1)


Placed = tuple[int, MediaRun]
"""The index of a run's first token in a prompt, and the run."""


def rope_positions(length: int, runs: Iterable[Placed] = ()) -> Tensor:
    """float32 [3, length] of a prompt. runs: its media, in order."""
    positions = np.empty((3, length), dtype=np.float32)
    at, following = 0, np.float32(0)
    for start, run in runs:
        positions[:, at:start] = following + np.arange(start - at, dtype=np.float32)
        following = following + np.float32(start - at)
        at = start + len(run)
        positions[:, start:at], following = run.positions(following)
    positions[:, at:] = following + np.arange(length - at, dtype=np.float32)
    return torch.from_numpy(positions)


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
            kept.append((int(np.searchsorted(user_tokens.numpy(), start)), run))
    return rope_positions(rows, kept)
