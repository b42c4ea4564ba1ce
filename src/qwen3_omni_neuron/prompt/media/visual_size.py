"""Images and videos of messages: their sizes, read without decoding, and what is shown of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from qwen3_omni_neuron.prompt.media.fields import FILES, Warn, ignore
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.pixels import CHANNELS
from qwen3_omni_neuron.prompt.media.sizes import (
    Grid,
    MediaSettings,
    SizeLimits,
    Sizes,
    VisualSize,
)
from qwen3_omni_neuron.prompt.media.video import Video, VideoHeader, load_video

if TYPE_CHECKING:
    from PIL.Image import Image

_BRACKETS = 2  # tokens around a video that is heard


def visual_size(
    kind: str,
    item: Mapping[str, Any],
    where: str,
    heard: MediaSettings | None,
    warn: Warn = ignore,
) -> VisualSize:
    """Return the size of an image or video item of a message.

    Of a file only the header is read, of a video's file its packets, too, and none is decoded.
    kind: "image" or "video". where: name of the item in errors. heard: settings for the sound of
    videos, None if it isn't wanted. warn: called for a damaged PIL image, which is decoded here,
    and once. Raises ImageError, VideoError or AudioError.
    """
    asked = SizeLimits.of(item)
    source = item.get(kind)
    if not isinstance(source, FILES):
        return VisualSize(where, *_shape(kind, item, where, warn), asked)

    def image(height: int, width: int) -> NoReturn:
        raise _MeasuredError(VisualSize(where, height, width, None, asked))

    def video(header: VideoHeader) -> NoReturn:
        tokens = 0 if heard is None else sound_tokens(header.audio_s, heard)
        size = header.height, header.width, header.frames
        raise _MeasuredError(VisualSize(where, *size, asked, tokens))

    audio_rate = heard.audio_rate if heard and item.get("audio") is None else None
    try:
        if kind == "image":
            load_image(item, where, image)
        else:
            load_video(item, where, audio_rate=audio_rate, check=video)
    except _MeasuredError as stopped:
        return stopped.size
    raise AssertionError("a file was read without a check of its header")


def sound_tokens(seconds: float, settings: MediaSettings) -> int:
    """Return the tokens of a video's sound, with those around it."""
    tokens = math.ceil(seconds * settings.audio_tokens_per_s)
    return tokens + _BRACKETS if tokens else 0


class _MeasuredError(Exception):
    """The header of a file was read, and nothing of it is decoded."""

    def __init__(self, size: VisualSize):
        self.size = size


def read_image(
    item: Mapping[str, Any],
    where: str,
    sizes: Sizes,
    asked: SizeLimits,
    check: Callable[[int, int], object] = ignore,
    warn: Warn = ignore,
) -> "tuple[Image, Grid]":
    """Read an image item; return it, and the grid with which it is shown.

    A file that is shrunk to fit, or of `detail` "low", may be decoded reduced: see
    `Sizes.least_size`. check, warn: see `load_image`. Raises its errors and those of `Sizes.grid`.
    """
    found: VisualSize | None = None

    def measure(height: int, width: int) -> tuple[int, int] | None:
        nonlocal found
        check(height, width)
        found = VisualSize(where, height, width, None, asked)
        return sizes.least_size(found, sizes.grid(found))

    picture = load_image(item, where, measure, warn)
    size = VisualSize(where, picture.height, picture.width, None, asked)
    if found is not None and found.height * found.width != size.height * size.width:
        # It was decoded reduced. It has the size in the file's header, which may lie on its side.
        size = found
        if (picture.height > picture.width) is not (found.height > found.width):
            size = replace(found, height=found.width, width=found.height)
    grid = sizes.grid(size)
    sizes.warn_of_shrinking(size, grid, warn)
    return picture, grid


def evenly(video: Video, frames: int) -> Video:
    """Return a video of so many of its frames, which are evenly spread, as those of a file are."""
    total = len(video.frames)
    if frames >= total:
        return video
    kept = [k * total // frames for k in range(frames)]
    return replace(video, frames=video.frames[kept], fps=video.fps * frames / total)


def _shape(
    kind: str, item: Mapping[str, Any], where: str, warn: Warn
) -> tuple[int, int, int | None]:
    """Return the height, width and frames (None for an image) of pixels in memory."""
    source = item.get(kind)
    if kind == "image":
        return *_picture_shape(source, where, warn), None
    try:
        frames = len(source)  # type: ignore[arg-type]
        first = source[0]  # type: ignore[index]
    except Exception:  # whatever the caller gave: reading it says what is wrong
        video = load_video(item, where, audio_rate=None)
        return *video.frames.shape[1:3], len(video.frames)
    return *_picture_shape(first, f"{where}.video[0]", warn), frames


def _picture_shape(source: Any, where: str, warn: Warn) -> tuple[int, int]:
    """Return the height and width of an RGB array, or else of what `load_image` makes of it."""
    if isinstance(source, np.ndarray) and source.ndim == 3 and source.shape[2] == CHANNELS:
        return source.shape[0], source.shape[1]
    picture = load_image({"image": source}, where, warn=warn)
    return picture.height, picture.width
