"""Rope positions over three axes (time, height, width).

Tokens of text and audio have the same position on all three axes: their count. Tokens of an image
have the positions of their row and column; tokens of a video also have the time of their frame,
which need not be a whole number. The next token's position is one more than the highest of these
positions.

Computed in numpy, because prompts are made while stages run, and every torch operation would
release the interpreter lock and wait to get it back.
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
    """Run of the tokens of an audio clip, an image or a video in a prompt.

    audio_tokens: number of its audio tokens. grid: frames, rows and columns of its vision tokens.
    frame_positions: positions from one frame to the next along the time axis. In a video with audio
    the two kinds of tokens are interleaved by time.
    """

    audio_tokens: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    frame_positions: float = 0.0

    @property
    def vision_tokens(self) -> int:
        """Number of tokens of the image or of the video's frames."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def __len__(self) -> int:
        return self.vision_tokens + self.audio_tokens

    def is_audio(self) -> NDArray[np.bool_]:
        """Return which tokens are audio tokens, bool [len(self)].

        A frame comes before the audio of the same time.
        """
        frames, rows, columns = self.grid
        if not self.audio_tokens or not self.vision_tokens:
            return np.full(len(self), self.audio_tokens > 0)
        frame_times = np.arange(frames) * self.frame_positions
        times = np.concatenate((frame_times.repeat(rows * columns), np.arange(self.audio_tokens)))
        return times.argsort(kind="stable") >= self.vision_tokens

    def positions(self, first: np.float32) -> tuple[NDArray[np.float32], np.float32]:
        """Return the run's positions, float32 [3, len(self)], and the next token's position.

        first: the run's first position. Positions of audio alone are [1, len(self)].
        """
        if not self.vision_tokens:
            following = first + np.arange(self.audio_tokens + 1, dtype=np.float32)
            return following[None, :-1], following[-1]
        times, *places = (np.arange(n, dtype=np.float32) for n in self.grid)
        axes = np.meshgrid(times * np.float32(self.frame_positions), *places, indexing="ij")
        vision = np.stack([axis.ravel() for axis in axes])
        is_audio = self.is_audio()
        positions = np.empty((3, len(self)), dtype=np.float32)
        positions[:, ~is_audio] = vision + first
        positions[:, is_audio] = np.arange(self.audio_tokens, dtype=np.float32) + first
        # As in the reference: one more than the highest position among the tokens after the last
        # token of the other kind, not among all tokens.
        (other,) = (is_audio != is_audio[-1]).nonzero()
        tail = other[-1] + 1 if len(other) else 0
        return positions, positions[:, tail:].max() + np.float32(1)


Placed = tuple[int, MediaRun]
"""Index in a prompt of a run's first token, and the run."""


def rope_positions(length: int, runs: Iterable[Placed] = ()) -> Tensor:
    """Return the positions of a prompt, float32 [3, length]. runs: its media, in order."""
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
    """Return the positions of a talker prompt, float32 [3, rows].

    user_tokens: int64 [U], indices of the prompt's tokens in user segments, which hold all `runs`;
    rows: U plus the rows of the assistant's turn.
    """
    kept = []
    for index, (start, run) in enumerate(runs):
        # The reference computes the talker's positions without use_audio_in_video. It still finds a
        # video with audio if an image or a silent video follows; else it counts it as text.
        silent_later = any(r.vision_tokens and not r.audio_tokens for _, r in runs[index + 1 :])
        if not run.audio_tokens or silent_later:
            kept.append((int(np.searchsorted(user_tokens.numpy(), start)), run))
    return rope_positions(rows, kept)
