"""Prompt of a conversation: token ids, positions, mel features and pixels."""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.pixels import Visual


@dataclass(frozen=True)
class MediaRun:
    """Run of a media item's tokens in a prompt.

    grid: frames, rows and columns of its vision tokens. frame_positions: time positions between
    frames. A video's audio tokens are interleaved by time.
    """

    audio_tokens: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    frame_positions: float = 0.0

    @property
    def vision_tokens(self) -> int:
        """Number of vision tokens."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def __len__(self) -> int:
        return self.vision_tokens + self.audio_tokens

    def is_audio(self) -> NDArray[np.bool_]:
        """Return which tokens are audio, bool [len(self)]; a frame precedes its audio."""
        frames, rows, columns = self.grid
        if not self.audio_tokens or not self.vision_tokens:
            return np.full(len(self), self.audio_tokens > 0)
        frame_times = np.arange(frames) * self.frame_positions
        times = np.concatenate((frame_times.repeat(rows * columns), np.arange(self.audio_tokens)))
        return times.argsort(kind="stable") >= self.vision_tokens

    def positions(self, first: np.float32) -> tuple[NDArray[np.float32], np.float32]:
        """Return the run's positions, float32 [3 (1: audio alone), len(self)], and the next one.

        first: the run's first position.
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
        # As in the reference, only tokens after the last one of the other kind count.
        (other,) = (is_audio != is_audio[-1]).nonzero()
        tail = other[-1] + 1 if len(other) else 0
        return positions, positions[:, tail:].max() + np.float32(1)


Placed = tuple[int, MediaRun]
"""Index in a prompt of a run's first token, and the run."""


# numpy: torch would release the interpreter lock in each operation, while stages compete for it.
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

    user_tokens: int64 [U], indices of the tokens in user segments. rows: U + assistant rows.
    """
    kept = []
    for index, (start, run) in enumerate(runs):
        # The reference ignores use_audio_in_video here. It finds a video with audio only if an
        # image or a silent video follows; else it counts the video as text.
        silent_later = any(r.vision_tokens and not r.audio_tokens for _, r in runs[index + 1 :])
        if not run.audio_tokens or silent_later:
            kept.append((int(np.searchsorted(user_tokens.numpy(), start)), run))
    return rope_positions(rows, kept)


@dataclass(frozen=True)
class TalkerPrompt:
    """Part of a prompt that the talker reads.

    token_ids: int64 [U], tokens of user segments. positions: float32 [3, U + 9], also of the
    assistant rows (see model.talker).
    """

    token_ids: Tensor
    positions: Tensor

    def __len__(self) -> int:
        """Count the rows, including the first generated token."""
        return int(self.positions.shape[1])

    def first(self, rows: int) -> "TalkerPrompt":
        """Return the prompt of the first user rows; later ones are unknown."""
        assistant = len(self) - len(self.token_ids)
        return TalkerPrompt(self.token_ids[:rows], self.positions[:, : rows + assistant])


@dataclass(frozen=True)
class Prompt:
    """Model inputs of one conversation.

    token_ids: int64 [S], with media as runs of placeholders. positions: float32 [3, S]: time,
    height, width. audio_mel: float32 [mel_bins, frames] of each clip and video's audio.
    audio_tokens, image_tokens: numbers of token_ids of audio, and of images and videos.
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


DIGEST_BYTES = 16
_NUMBERS = DIGEST_BYTES // 4  # int32 numbers per digest
HEAD_ROWS = 64
ID_BITS = 64
_NO_MEDIA, _NO_SOURCES = np.empty(0, np.int64), np.empty((1, 0), np.int32)

Unit = tuple[bytes, int]
"""Digest of one unit of an encoder's input, and the number of its rows."""


class RowKeys:
    """Keys of a prompt's rows: equal leading keys mean equal rows in the KV cache.

    A key is a row's token id, positions, and for media the digest of the encoder's input: a window
    of 8 s of audio, an image, or a frame.
    token_ids: int64 [rows]. positions: float32 [3, rows]. media: int64 [media], indices of media
    rows. sources: int32 [numbers, media], digests. cache_key: the request's option.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        media: NDArray[np.int64] = _NO_MEDIA,
        sources: NDArray[np.int32] = _NO_SOURCES,
        cache_key: str | None = None,
    ):
        self.token_ids, self.positions = token_ids, positions
        self.media, self.sources, self.cache_key = media, sources, cache_key
        self._head = int.from_bytes(token_ids[:HEAD_ROWS].tobytes(), "little")
        self._text_rows = int(media[0]) if len(media) else len(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def shared(self, other: "RowKeys") -> int:
        """Count the leading rows that are equal in both."""
        if self.cache_key != other.cache_key:
            return 0
        # Most prompts differ early, in text; this is ten times as fast as numpy there.
        differs, rows = self._head ^ other._head, min(len(self), len(other))
        row = ((differs & -differs).bit_length() - 1) // ID_BITS if differs else rows
        if row <= min(self._text_rows, rows, HEAD_ROWS):
            return row
        rows = _alike(self.token_ids, other.token_ids)
        rows = _alike(self.positions[:, :rows], other.positions)
        media = self.media_rows(rows)
        same = _alike(self.sources[:, :media], other.sources)
        return rows if same == media else int(self.media[same])

    def media_rows(self, rows: int) -> int:
        """Count the media rows among the first `rows`."""
        return bisect_left(self.media, rows)  # numpy's releases the interpreter lock

    def followed_by(self, token_ids: list[int]) -> "RowKeys":
        """Return the keys followed by text tokens, as decode steps append them."""
        # Engines count positions in float64. After a video with fractional positions, a prompt's
        # float32 ones may differ in the last bit: such rows count as different.
        following = float(self.positions.max()) + np.arange(1, len(token_ids) + 1)
        added = np.tile(following.astype(np.float32), (3, 1))
        return RowKeys(
            np.concatenate((self.token_ids, token_ids)),
            np.concatenate((self.positions, added), 1),
            self.media,
            self.sources,
            self.cache_key,
        )


def _alike(one: NDArray[Any], other: NDArray[Any]) -> int:
    length = min(one.shape[-1], other.shape[-1])
    differs = one[..., :length] != other[..., :length]
    if differs.ndim > 1:
        differs = differs.any(0)
    return int(differs.argmax()) if differs.any() else length


NO_KEYS = RowKeys(np.empty(0, np.int64), np.empty((3, 0), np.float32))


@dataclass(frozen=True)
class PromptKeys:
    """Keys of a prompt's thinker rows, and of its talker's user rows."""

    thinker: RowKeys
    talker: RowKeys


def prompt_keys(prompt: Prompt, config: OmniConfig, cache_key: str | None = None) -> PromptKeys:
    """Compute the keys of a prompt. cache_key: the request's option.

    The talker's row of a media token is a hidden state of the thinker, which depends on all earlier
    rows: its key includes the thinker position, and a digest of the earlier token ids.
    """
    talks = prompt.talker
    thinker = RowKeys(prompt.token_ids.numpy(), prompt.positions.numpy(), cache_key=cache_key)
    user_ids = talks.token_ids.numpy()
    talker = RowKeys(user_ids, talks.positions.numpy()[:, : len(user_ids)], cache_key=cache_key)
    if not prompt.audio_tokens and not prompt.image_tokens:
        return PromptKeys(thinker, talker)
    c, ids = config.thinker, thinker.token_ids
    kinds = {
        c.audio_token_id: _windows(prompt, config),
        c.image_token_id: _frames(prompt.images, c.vision.merge_size),
        c.video_token_id: _frames(prompt.videos, c.vision.merge_size),
    }
    (media,) = np.isin(ids, c.media_token_ids).nonzero()
    sources = np.zeros((_NUMBERS + 1, len(media)), np.int32)
    for token_id, units in kinds.items():
        (rows,) = (ids[media] == token_id).nonzero()
        at = 0
        for digest, count in units:
            own = rows[at : at + count]
            sources[:_NUMBERS, own] = np.frombuffer(digest, np.int32)[:, None]
            sources[_NUMBERS, own] = np.arange(len(own))
            at += count
    thinker = RowKeys(ids, thinker.positions, media, sources, cache_key)
    # All media are in user segments.
    (user_media,) = np.isin(user_ids, c.media_token_ids).nonzero()
    places = thinker.positions[:, media].view(np.int32)
    sources = np.vstack((sources, places, _contexts(thinker)))
    talker = RowKeys(user_ids, talker.positions, user_media, sources, cache_key)
    return PromptKeys(thinker, talker)


def _contexts(keys: RowKeys) -> NDArray[np.int32]:
    """Return each media row's digest of the token ids before its run."""
    contexts = np.empty((_NUMBERS, len(keys.media)), np.int32)
    (starts,) = (np.diff(keys.media, prepend=-2) > 1).nonzero()
    before, row = hashlib.sha256(), 0
    for start in starts:
        run = int(keys.media[start])
        before.update(keys.token_ids[row:run].tobytes())
        contexts[:, start:] = np.frombuffer(before.digest()[:DIGEST_BYTES], np.int32)[:, None]
        row = run
    return contexts


def _windows(prompt: Prompt, config: OmniConfig) -> Iterator[Unit]:
    c, clips = config.thinker.audio, prompt.audio_mel
    # Padding of the encoder's chunks depends on all clips: see model.audio_encoder.
    width = min(c.chunk_mel_frames, max((clip.shape[1] for clip in clips), default=0))
    for clip in clips:
        windows = clip.split(c.window_mel_frames, 1)
        digests = _digests(clip, [window.numpy() for window in windows], (width,))
        for window, digest in zip(windows, digests, strict=True):
            yield digest, c.tokens(window.shape[1])


def _frames(visuals: tuple[Visual, ...], merge_size: int) -> Iterator[Unit]:
    for visual in visuals:
        frames, height, width = visual.grid
        parts = [visual.part(index, index + 1).pixels for index in range(frames)]
        for digest in _digests(visual.pixels, parts):
            yield digest, height * width // merge_size**2


_known = WeakIdKeyDictionary()  # tensor or array -> its digests by `numbers`


def _digests(
    whole: object, parts: Sequence[NDArray[Any]], numbers: tuple[int, ...] = ()
) -> list[bytes]:
    """Return a digest of each part of `whole`, combined with `numbers`, computed once."""
    made: dict[tuple[int, ...], list[bytes]] = _known.setdefault(whole, {})
    if numbers not in made:
        made[numbers] = [_digest(part, numbers) for part in parts]
    return made[numbers]


def _digest(values: NDArray[Any], numbers: tuple[int, ...]) -> bytes:
    contents = hashlib.sha256(repr((*values.shape, *numbers)).encode())
    contents.update(np.ascontiguousarray(values).data)
    return contents.digest()[:DIGEST_BYTES]
