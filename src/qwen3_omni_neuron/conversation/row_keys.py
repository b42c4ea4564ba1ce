"""Keys of a prompt's rows, by which the common prefix of two prompts is found.

Two prompts whose first n keys are equal have the same first n rows in the KV cache: a row's keys
and values depend on that row's input, on its position, and on the rows before it. The key of a row
is its token id, its positions, and, where encoded media stands in its place, the digest of what the
encoder reads to make it: a window of 8 s of audio, an image, or a frame of a video.
"""

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Patches, Prompt
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import user_positions

DIGEST_BYTES = 16
_NUMBERS = DIGEST_BYTES // 4  # int32 numbers that a digest takes in a key
WIDTH = 2 * _NUMBERS + 5

Unit = tuple[bytes, int]
"""Digest of what an encoder reads at a time, and the number of rows that it makes of that."""


@dataclass(frozen=True, eq=False)
class RowKeys:
    """Keys of the rows of one prompt.

    values: int32 [rows, WIDTH]. is_media: bool [rows], true where encoded media stands.
    """

    values: NDArray[np.int32]
    is_media: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.values)

    def shared(self, other: "RowKeys") -> int:
        """Return how many of the first rows are the same in both."""
        length, start, block = min(len(self), len(other)), 0, 64
        while start < length:  # most prompts differ early
            stop = min(start + block, length)
            differs = (self.values[start:stop] != other.values[start:stop]).any(1)
            if differs.any():
                return start + int(differs.argmax())
            start, block = stop, 4 * block
        return length

    def first(self, rows: int) -> "RowKeys":
        """Return the keys of the first rows."""
        return RowKeys(self.values[:rows], self.is_media[:rows])

    def media_rows(self, rows: int) -> int:
        """Count the rows of media among the first `rows`."""
        return int(np.count_nonzero(self.is_media[:rows]))

    def followed_by(self, token_ids: list[int]) -> "RowKeys":
        """Return the keys with those of text tokens behind them, as decode steps append them."""
        added = np.zeros((len(token_ids), WIDTH), np.int32)
        added[:, 0] = token_ids
        # An engine counts positions in float64. A video's need not be whole, so that a prompt's
        # float32 may differ from these in the last bit: such rows are not the same, then.
        last = float(self.values[:, -3:].view(np.float32).max())
        positions = (last + np.arange(1, len(token_ids) + 1)).astype(np.float32)
        added[:, -3:] = positions.view(np.int32)[:, None]
        is_media = np.concatenate((self.is_media, np.zeros(len(token_ids), bool)))
        return RowKeys(np.concatenate((self.values, added)), is_media)


@dataclass(frozen=True)
class PromptKeys:
    """Keys of a prompt's rows in the thinker, and of its user rows in the talker."""

    thinker: RowKeys
    talker: RowKeys


def prompt_keys(prompt: Prompt, config: OmniConfig) -> PromptKeys:
    """Compute the keys of a prompt.

    The talker's row of an audio, image or video token is a hidden state of the thinker, which
    depends on all that the thinker has read before: also on what the talker does not read, such as
    the system prompt. So its key has a digest of the thinker's keys up to the item.
    """
    ids = prompt.token_ids.numpy()
    thinker = np.zeros((len(ids), WIDTH), np.int32)
    thinker[:, 0] = ids
    thinker[:, -3:] = _as_integers(prompt.positions)
    c = config.thinker
    sources = {
        c.audio_token_id: _windows(prompt, config),
        c.image_token_id: _images(prompt.images, c.vision.merge_size),
        c.video_token_id: _frames(prompt.videos, c.vision.merge_size),
    }
    is_media = np.zeros(len(ids), bool)
    for token_id, units in sources.items():
        is_kind = ids == token_id
        is_media |= is_kind
        (rows,) = is_kind.nonzero()
        at = 0
        for digest, count in units:
            own = rows[at : at + count]
            thinker[own, 1 : 1 + _NUMBERS] = np.frombuffer(digest, np.int32)
            thinker[own, 1 + _NUMBERS] = np.arange(len(own))
            at += count
    user = user_positions(prompt.token_ids, config).numpy()
    talker = thinker[user]
    talker[:, -3:] = _as_integers(prompt.talker.positions)[: len(user)]
    if is_media.any():
        talker[:, 2 + _NUMBERS : -3] = _contexts(thinker, is_media)[user]
    return PromptKeys(RowKeys(thinker, is_media), RowKeys(talker, is_media[user]))


def _contexts(keys: NDArray[np.int32], is_media: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return for each row of media the digest of all keys before its run of media, else zeros."""
    contexts = np.zeros((len(keys), _NUMBERS), np.int32)
    edges = np.flatnonzero(np.diff(is_media.astype(np.int8), prepend=0, append=0))
    before, at = hashlib.sha256(), 0
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        before.update(keys[at:start].tobytes())
        contexts[start:stop] = np.frombuffer(before.digest()[:DIGEST_BYTES], np.int32)
        at = start
    return contexts


def _windows(prompt: Prompt, config: OmniConfig) -> Iterator[Unit]:
    """Yield the windows of the audio clips, in order."""
    c, clips = config.thinker.audio, prompt.audio_mel
    # The width that the encoder pads its chunks to depends on all clips: see model.audio_encoder.
    width = min(c.chunk_mel_frames, max((clip.shape[1] for clip in clips), default=0))
    for clip in clips:
        windows = clip.split(c.window_mel_frames, 1)
        digests = _digests(clip, windows, (width,))
        for window, digest in zip(windows, digests, strict=True):
            yield digest, c.tokens(window.shape[1])


def _images(images: tuple[Patches, ...], merge_size: int) -> Iterator[Unit]:
    for image in images:
        (digest,) = _digests(image.values, (image.values,), image.grid)
        yield digest, len(image.values) // merge_size**2


def _frames(videos: tuple[Patches, ...], merge_size: int) -> Iterator[Unit]:
    for video in videos:
        frames, height, width = video.grid
        parts = video.values.chunk(frames)
        digests = _digests(video.values, parts, (height, width))
        for frame, digest in zip(parts, digests, strict=True):
            yield digest, len(frame) // merge_size**2


class _Digests:
    """Digests of the parts of tensors, computed once for each tensor.

    The features and patches of a session are the same objects in each of its turns, and never
    change. _known: by the tensor's id, while it lives.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], list[bytes]]] = {}

    def __call__(
        self, whole: Tensor, parts: Sequence[Tensor], numbers: tuple[int, ...]
    ) -> list[bytes]:
        """Return a digest of each part of a tensor, and of the numbers that it is read with."""
        key = id(whole)
        known = self._known.get(key)
        if known is None or known[0]() is not whole or known[1] != numbers:
            found = [_digest(part, numbers) for part in parts]
            reference = weakref.ref(whole, lambda _: self._known.pop(key, None))
            known = self._known[key] = reference, numbers, found
        return known[2]


_digests = _Digests()


def _digest(values: Tensor, numbers: tuple[int, ...]) -> bytes:
    contents = hashlib.sha256(repr((*values.shape, *numbers)).encode())
    contents.update(values.contiguous().numpy().data)
    return contents.digest()[:DIGEST_BYTES]


def _as_integers(positions: Tensor) -> NDArray[np.int32]:
    """Return positions float32 [3, rows] as the bits of their numbers, int32 [rows, 3]."""
    return np.ascontiguousarray(positions.numpy().T).view(np.int32)
