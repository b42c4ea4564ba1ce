"""Animated WebP as frames with timestamps. FFmpeg does not decode it; Pillow does."""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import VideoError
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.video_times import Timeline

_CHUNK = struct.Struct("<4sI")
_CANVAS = 4, 7  # places of width - 1 and height - 1, 3 bytes each, in that chunks flags
_DURATION_AT = 12  # in a frame's chunk, after its place and size
_SHORT_MS = 100  # time of a frame without a duration, as in browsers
MOST_CHUNKS = 200_000  # most chunks of a file: an hour and a half of 30 frames a second


@dataclass(frozen=True, eq=False)
class AnimatedWebp:
    """Animation by the headers of its chunks, not decoded.

    content: the file, up to its last whole frame. height, width: size of a frame in pixels.
    durations_ms: time of each whole frame. complete: no frame is cut short.
    """

    content: bytes
    height: int
    width: int
    durations_ms: tuple[int, ...]
    complete: bool

    def timeline(self) -> Timeline:
        """Return the timeline, with frames told by their number."""
        ends = np.cumsum(self.durations_ms, dtype=np.int64)
        numbers = np.arange(len(ends))
        constant = min(self.durations_ms) == max(self.durations_ms)
        ticks = np.concatenate(([0], ends[:-1]))
        tick, start = Fraction(1, 1000), Fraction(0)
        return Timeline(ticks, numbers, tick, int(ends[-1]) * tick, constant, True, start)

    def frames(self, chosen: list[int], where: str) -> Iterator[NDArray[np.uint8]]:
        """Decode frames, [height, width, 3] each. chosen: ascending. Raises ImageError."""
        from PIL import Image

        with Image.open(io.BytesIO(self.content), formats=["WEBP"]) as picture:
            for number in chosen:
                picture.seek(number)
                yield np.asarray(load_image({"image": picture}, where))


def animated_webp(content: bytes, where: str) -> AnimatedWebp | None:
    """Read the chunks' headers of a WebP file. where: name of the file in errors.

    Raises VideoError if there are more than MOST_CHUNKS. Returns None if it has no whole frame of
    several, or does not begin with the chunk VP8X, in which an animation has its size.
    """
    first = at = end = _CHUNK.size + 4  # RIFF, its size, WEBP
    durations: list[int] = []
    complete, chunks = True, 0
    while at + _CHUNK.size <= len(content):
        chunks += 1
        if chunks > MOST_CHUNKS:
            raise VideoError(
                f"{where}: {len(content)} bytes are a WebP of more than {MOST_CHUNKS} chunks. Send "
                "a part of it."
            )
        name, size = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size + size + size % 2
        if at > len(content) + size % 2:
            complete = False
            break
        if name == b"ANMF":
            durations.append(_number(content, at - size - size % 2 + _DURATION_AT) or _SHORT_MS)
        end = min(at, len(content))
    complete &= end == len(content) >= _CHUNK.unpack_from(content)[1] + _CHUNK.size
    if not durations or content[first : first + 4] != b"VP8X":
        return None
    if not complete:
        content = _CHUNK.pack(b"RIFF", end - _CHUNK.size) + content[_CHUNK.size : end]
    width, height = (_number(content, first + _CHUNK.size + offset) + 1 for offset in _CANVAS)
    return AnimatedWebp(content, height, width, tuple(durations), complete)


def _number(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 3], "little")
