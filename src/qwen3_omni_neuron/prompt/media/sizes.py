"""Sizes to which images and frames are resized, their numbers of tokens, and media settings.

Nothing here needs torch, because a process that only decodes uses it, too.
"""

import math
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.errors import (
    CheckpointError,
    ImageError,
    InputError,
    PromptTooLongError,
    VideoError,
    format_value,
)
from qwen3_omni_neuron.prompt.media.fields import whole_number
from qwen3_omni_neuron.prompt.media.image import MAX_ASPECT
from qwen3_omni_neuron.prompt.preprocessor import whole_setting

Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches in a frame."""
PixelLimits = tuple[int, int]  # minimum and maximum number of pixels after resizing
_MOST_SIDE = 1024  # a patch's side: 16 pixels
_MAX_PIXELS = 2**62  # larger limits are reduced to this, which fits a float and 64 bits
# Limits per video frame. Not in the checkpoint: transformers Qwen3OmniMoeProcessor sets them.
_VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)


@dataclass(frozen=True)
class SizeLimits:
    """Limits that an item sets for its size.

    min_pixels, max_pixels: number of pixels after resizing; None: the default of its kind.
    most_tokens: maximum number of its tokens; None: no maximum.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    most_tokens: int | None = None


USUAL = SizeLimits()


@dataclass(frozen=True)
class Sizes:
    """Sizes of patches and images in a checkpoint's preprocessor_config.json.

    patch_size: side of a patch in pixels. merge_size: patches on each side of the square that
    becomes one token. temporal_patch_size: frames in a patch. min_pixels, max_pixels: number of
    pixels of an image after resizing.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Sizes":
        """Read the settings of a preprocessor_config.json, with the defaults of transformers.

        Raises CheckpointError for settings that make no patches.
        """
        size = settings.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(
                f"preprocessor_config.json has size {format_value(size)}, not an object."
            )
        limits = {
            "min_pixels": size.get("shortest_edge", 56 * 56),
            "max_pixels": size.get("longest_edge", 28 * 28 * 1280),
        } | {n: settings[n] for n in ("min_pixels", "max_pixels") if settings.get(n) is not None}
        return cls(
            whole_setting(settings, "patch_size", 14, _MOST_SIDE),
            whole_setting(settings, "merge_size", 2, _MOST_SIDE),
            whole_setting(settings, "temporal_patch_size", 2, _MOST_SIDE),
            whole_setting(limits, "min_pixels", 0, _MAX_PIXELS),
            whole_setting(limits, "max_pixels", 0, _MAX_PIXELS),
        )

    def image_grid(self, height: int, width: int, where: str, asked: SizeLimits = USUAL) -> Grid:
        """Return the grid of patches of an image; its first number is 1.

        where: name of the item in errors. Raises ImageError for a side more than MAX_ASPECT times
        the other or for impossible limits, and PromptTooLongError for more than asked.most_tokens.
        """
        limits = _limits((self.min_pixels, self.max_pixels), asked, where, ImageError)
        grid = self._grid(1, height, width, limits, where, ImageError)
        what = f"{where} is an image of {width} x {height} pixels, which"
        advice = f"Lower its max_pixels (now {limits[1]})."
        self._check_tokens(grid, asked.most_tokens, what, advice)
        return grid

    def video_grid(
        self, frames: int, height: int, width: int, where: str, asked: SizeLimits = USUAL
    ) -> Grid:
        """Return the grid of patches of a video; its first number counts groups of frames.

        The limits count the pixels of a frame. Raises VideoError where `image_grid` raises
        ImageError, and PromptTooLongError.
        """
        limits = _limits(_VIDEO_LIMITS, asked, where, VideoError)
        grid = self._grid(frames, height, width, limits, where, VideoError)
        what = f"{where} is a video of {frames} frames of {width} x {height} pixels, which"
        advice = f"Lower its max_pixels (now {limits[1]} a frame), or its fps."
        self._check_tokens(grid, asked.most_tokens, what, advice)
        return grid

    def tokens(self, grid: Grid) -> int:
        """Count the tokens that a grid of patches becomes in a prompt."""
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def pixels(self, grid: Grid) -> tuple[int, int]:
        """Return the height and width in pixels of a grid."""
        return grid[1] * self.patch_size, grid[2] * self.patch_size

    def resized(self, height: int, width: int, limits: PixelLimits) -> tuple[int, int]:
        """Return the height and width to which an image is resized.

        Both are multiples of patch_size * merge_size, their ratio is nearly kept, and their product
        is within the limits, unless one such multiple a side is already more.
        Raises ValueError where one side is more than MAX_ASPECT times the other.
        Source: transformers smart_resize.
        """
        aspect = max(height, width) / min(height, width)
        if aspect > MAX_ASPECT:
            raise ValueError(
                f"one side is {aspect:.1f} times the other, and {MAX_ASPECT} times is the most"
            )
        unit = self.patch_size * self.merge_size
        low, high = limits
        nearest = round(height / unit) * round(width / unit) * unit**2
        if nearest > high:
            shrink = math.sqrt((height * width) / high)
            sides = [max(1, math.floor(side / shrink / unit)) for side in (height, width)]
        elif nearest < low:
            grow = math.sqrt(low / (height * width))
            sides = [math.ceil(side * grow / unit) for side in (height, width)]
        else:
            sides = [round(side / unit) for side in (height, width)]
        return sides[0] * unit, sides[1] * unit

    def _grid(
        self,
        frames: int,
        height: int,
        width: int,
        limits: PixelLimits,
        where: str,
        error: type[InputError],
    ) -> Grid:
        if height < 1 or width < 1:
            raise error(f"{where} is {width} x {height} pixels: there is nothing to see.")
        try:
            resized = self.resized(height, width, limits)
        except ValueError as reason:
            raise error(f"{where} is {width} x {height} pixels: {reason}.") from reason
        times = -(-frames // self.temporal_patch_size)
        return times, resized[0] // self.patch_size, resized[1] // self.patch_size

    def _check_tokens(self, grid: Grid, most: int | None, what: str, advice: str) -> None:
        tokens = self.tokens(grid)
        if most is not None and tokens > most:
            raise PromptTooLongError(
                f"{what} makes {tokens} vision tokens; {most} is the most. {advice}"
            )


@dataclass(frozen=True)
class MediaSettings:
    """Settings of a checkpoint for decoding media.

    audio_rate: sampling rate in Hz. audio_tokens_per_s: number of tokens of a second of audio.
    sizes: sizes to which images and frames are resized.
    """

    audio_rate: int
    audio_tokens_per_s: float
    sizes: Sizes

    def longest_audio_s(self, most_tokens: int | None) -> float:
        """Return the length of audio with `most_tokens` tokens; None: any number."""
        return float("inf") if most_tokens is None else most_tokens / self.audio_tokens_per_s


def _limits(
    usual: PixelLimits, asked: SizeLimits, where: str, error: type[InputError]
) -> PixelLimits:
    min_pixels = _pixels(asked.min_pixels, "min_pixels", where, error)
    max_pixels = _pixels(asked.max_pixels, "max_pixels", where, error)
    if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
        raise error(f"{where} has min_pixels {min_pixels}, above its max_pixels {max_pixels}.")
    low = usual[0] if min_pixels is None else min_pixels
    high = usual[1] if max_pixels is None else max_pixels
    if low <= high:
        return low, high
    # Only one limit was given, and the other's default contradicts it. The minimum becomes 1, not
    # the maximum: an image enlarged to a minimum is rounded up, beyond an equal maximum.
    return (low, low) if max_pixels is None else (1, high)


def _pixels(value: Any, name: str, where: str, error: type[InputError]) -> int | None:
    """Return an item's limit, None if it has none. Raises `error`."""
    if value is None:
        return None
    pixels = whole_number(value)
    if pixels is None or pixels < 1:
        raise error(f"{where} has {name} {format_value(value)}; it is a whole number, 1 or more.")
    return min(pixels, _MAX_PIXELS)
