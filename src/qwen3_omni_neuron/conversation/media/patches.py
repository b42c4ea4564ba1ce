"""Images and video frames -> pixels in the size that the vision encoder takes.

The settings are those of the checkpoint's preprocessor_config.json. An item's tokens are counted
before memory is spent on it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.fields import whole_number
from qwen3_omni_neuron.conversation.media.pixels import CHANNELS, Grid, PixelSettings, Visual
from qwen3_omni_neuron.conversation.preprocessor import read_preprocessor
from qwen3_omni_neuron.errors import (
    ImageError,
    InputError,
    PromptTooLongError,
    VideoError,
    format_value,
)

if TYPE_CHECKING:
    from PIL.Image import Image

Limits = tuple[int, int]  # minimum and maximum of pixels after resizing
_MAX_PIXELS = 2**62  # larger limits are cut to this one, which fits a float and 64 bits
# Per frame of a video. Not in the checkpoint: transformers Qwen3OmniMoeProcessor sets them.
_VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)


@dataclass(frozen=True)
class SizeLimits:
    """Limits that an item sets for its size.

    min_pixels, max_pixels: after resizing; None: the default of its kind. most_tokens: maximum of
    tokens that it may become; None: no maximum.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    most_tokens: int | None = None


USUAL = SizeLimits()


class PatchMaker:
    """Resizer of images and videos for one checkpoint's patches, without state between calls.

    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    def __init__(self, folder: Path):
        """Load the settings of the checkpoint in `folder`.

        Raises CheckpointError where it has no usable preprocessor_config.json.
        """
        self._pixels = pixels = PixelSettings.of(read_preprocessor(folder))
        self.patch_size, self.merge_size = pixels.patch_size, pixels.merge_size
        self.temporal_patch_size = pixels.temporal_patch_size
        self._image_limits: Limits = (pixels.min_pixels, pixels.max_pixels)

    def image(self, picture: "Image", where: str, asked: SizeLimits = USUAL) -> Visual:
        """Resize an RGB image. where: names the item in errors.

        Raises ImageError for a side more than 200 times the other or for impossible limits, and
        PromptTooLongError for more tokens than asked.most_tokens.
        """
        width, height = picture.size
        limits = self._limits(self._image_limits, asked, where, ImageError)
        grid = self._grid(1, height, width, limits, where, ImageError)
        what = f"{where} is an image of {width} x {height} pixels, which"
        advice = f"Lower its max_pixels (now {limits[1]})."
        self._check_tokens(grid, asked.most_tokens, what, advice)
        return Visual(self._pixels.pixels(picture, self._size(grid))[None], self._pixels)

    def video(self, frames: NDArray[np.uint8], where: str, asked: SizeLimits = USUAL) -> Visual:
        """Resize uint8 frames [n, height, width, 3], which must not change later.

        The last one is repeated up to a multiple of temporal_patch_size. The limits count the
        pixels of a frame; their defaults are 131,072 and 786,432.
        Pillow resizes the frames, torchvision those of the reference: both are bicubic with
        antialiasing, and a pixel differs by at most one of 256 levels.
        Raises VideoError and PromptTooLongError in the cases of `image`.
        """
        shape = list(frames.shape)
        if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != CHANNELS or 0 in shape:
            raise VideoError(
                f"{where} has frames of {frames.dtype} {shape}. Give uint8 [n, height, width, 3]."
            )
        grid = self.video_grid(shape[0], shape[1], shape[2], where, asked)
        return Visual(self._resized(frames, grid), self._pixels)

    def video_grid(
        self, frames: int, height: int, width: int, where: str, asked: SizeLimits = USUAL
    ) -> Grid:
        """Return the grid of `video` for frames of this number and size, or raise its error."""
        limits = self._limits(_VIDEO_LIMITS, asked, where, VideoError)
        grid = self._grid(frames, height, width, limits, where, VideoError)
        what = f"{where} is a video of {frames} frames of {width} x {height} pixels, which"
        advice = f"Lower its max_pixels (now {limits[1]} a frame), or its fps."
        self._check_tokens(grid, asked.most_tokens, what, advice)
        return grid

    def tokens(self, grid: Grid) -> int:
        """Count the tokens that a grid of patches becomes in a prompt."""
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def _limits(
        self, usual: Limits, asked: SizeLimits, where: str, error: type[InputError]
    ) -> Limits:
        min_pixels = _pixels(asked.min_pixels, "min_pixels", where, error)
        max_pixels = _pixels(asked.max_pixels, "max_pixels", where, error)
        if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
            raise error(f"{where} has min_pixels {min_pixels}, above its max_pixels {max_pixels}.")
        low = usual[0] if min_pixels is None else min_pixels
        high = usual[1] if max_pixels is None else max_pixels
        if low <= high:
            return low, high
        # Only one was given, and the other's default contradicts it. The minimum becomes 1, not
        # the maximum: an image enlarged to a minimum is rounded up, beyond an equal maximum.
        return (low, low) if max_pixels is None else (1, high)

    def _grid(
        self,
        frames: int,
        height: int,
        width: int,
        limits: Limits,
        where: str,
        error: type[InputError],
    ) -> Grid:
        if height < 1 or width < 1:
            raise error(f"{where} is {width} x {height} pixels: there is nothing to see.")
        try:
            resized = self._pixels.resized(height, width, limits)
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

    def _size(self, grid: Grid) -> tuple[int, int]:
        """Return the height and width in pixels of a grid."""
        return grid[1] * self.patch_size, grid[2] * self.patch_size

    def _resized(self, frames: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """Resize frames, and repeat the last one where the grid takes more of them."""
        from PIL import Image

        size, n = self._size(grid), grid[0] * self.temporal_patch_size
        if frames.shape[:3] == (n, *size):
            return frames
        pixels = np.empty((n, *size, CHANNELS), np.uint8)
        for index, frame in enumerate(frames):
            pixels[index] = self._pixels.pixels(Image.fromarray(frame), size)
        pixels[len(frames) :] = pixels[len(frames) - 1]
        return pixels


def _pixels(value: Any, name: str, where: str, error: type[InputError]) -> int | None:
    """Return a limit that an item has, None where it has none. Raises `error`."""
    if value is None:
        return None
    pixels = whole_number(value)
    if pixels is None or pixels < 1:
        raise error(f"{where} has {name} {format_value(value)}; it is a whole number, 1 or more.")
    return min(pixels, _MAX_PIXELS)
