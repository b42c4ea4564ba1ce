"""Images and video frames -> the patches that the vision encoder takes.

transformers' image processor resizes, scales and normalises, with the settings of the checkpoint's
preprocessor_config.json. This module adds what it can't do without torchvision (frames of a video)
and what it doesn't do at all: count the tokens before it spends memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.fields import whole_number
from qwen3_omni_neuron.conversation.media.image import load_image_processor
from qwen3_omni_neuron.conversation.prompt import Grid, Patches
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
_CHANNELS = 3
_MAX_PIXELS = 2**62  # larger limits are cut to this one, which fits a float and 64 bits
# Per frame of a video. Not in the checkpoint: transformers Qwen3OmniMoeProcessor sets them.
_VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)
_PAIRS_A_CALL = 4  # only a few frames at a time: in float32 they are large


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
    """Maker of patches for one checkpoint, without state between calls.

    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    def __init__(self, folder: Path):
        """Load the settings of the checkpoint in `folder`.

        Raises CheckpointError where it has no usable preprocessor_config.json.
        """
        self._processor, self._smart_resize = load_image_processor(folder)
        size = self._processor.size
        self.patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size
        self.temporal_patch_size: int = self._processor.temporal_patch_size
        self._image_limits: Limits = (size["shortest_edge"], size["longest_edge"])

    def image(self, picture: "Image", where: str, asked: SizeLimits = USUAL) -> Patches:
        """Make the patches of an RGB image; grid[0] is 1. where: names the item in errors.

        Raises ImageError for a side more than 200 times the other or for impossible limits, and
        PromptTooLongError for more tokens than asked.most_tokens.
        """
        width, height = picture.size
        limits = self._limits(self._image_limits, asked, where, ImageError)
        grid = self._grid(1, height, width, limits, where, ImageError)
        what = f"{where} is an image of {width} x {height} pixels, which"
        advice = f"Lower its max_pixels (now {limits[1]})."
        self._check_tokens(grid, asked.most_tokens, what, advice)
        pixels = [np.asarray(picture.convert("RGB"))]
        return Patches(torch.from_numpy(self._run(pixels, limits, self.temporal_patch_size)), grid)

    def video(self, frames: NDArray[np.uint8], where: str, asked: SizeLimits = USUAL) -> Patches:
        """Make the patches of uint8 frames [n, height, width, 3].

        grid[0] is n / temporal_patch_size; where that is not whole the last frame is repeated. The
        limits count the pixels of a frame; their defaults are 131,072 and 786,432.
        Pillow resizes the frames, torchvision those of the reference: both are bicubic with
        antialiasing, and a pixel differs by at most one of 256 levels.
        Raises VideoError and PromptTooLongError in the cases of `image`.
        """
        shape = list(frames.shape)
        if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != _CHANNELS or 0 in shape:
            raise VideoError(
                f"{where} has frames of {frames.dtype} {shape}. Give uint8 [n, height, width, 3]."
            )
        grid = self.video_grid(shape[0], shape[1], shape[2], where, asked)
        limits = self._limits(_VIDEO_LIMITS, asked, where, VideoError)
        return Patches(torch.from_numpy(self._pairs(frames, grid, limits)), grid)

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
            resized = self._smart_resize(
                height,
                width,
                factor=self.patch_size * self.merge_size,
                min_pixels=limits[0],
                max_pixels=limits[1],
            )
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

    def _pairs(self, frames: NDArray[np.uint8], grid: Grid, limits: Limits) -> NDArray[np.float32]:
        """Cut frames into patches that hold temporal_patch_size frames each."""
        times, places, together = grid[0], grid[1] * grid[2], self.temporal_patch_size
        area = self.patch_size**2
        patches = np.empty((times, places, _CHANNELS, together, area), np.float32)
        for start in range(0, times, _PAIRS_A_CALL):
            some = frames[start * together : (start + _PAIRS_A_CALL) * together]
            missing = -len(some) % together
            some = np.concatenate([some, np.repeat(some[-1:], missing, axis=0)])
            alone = self._run(list(some), limits, 1)  # [frames * places, channels * area]
            # [t, in pair, place, channel, area] -> [t, place, channel, in pair, area]
            patches[start : start + _PAIRS_A_CALL] = alone.reshape(
                -1, together, places, _CHANNELS, area
            ).transpose(0, 2, 3, 1, 4)
        return patches.reshape(times * places, -1)

    def _run(
        self, pixels: Sequence[NDArray[np.uint8]], limits: Limits, temporal: int
    ) -> NDArray[np.float32]:
        """Run the image processor on images [height, width, 3].

        temporal: how often a patch repeats the pixels of its image.
        """
        done = self._processor(
            images=list(pixels),
            size={"shortest_edge": limits[0], "longest_edge": limits[1]},
            temporal_patch_size=temporal,
            # Else it is guessed, and wrongly for an image that is 1 or 3 pixels high.
            input_data_format="channels_last",
            return_tensors="np",
        )
        return np.ascontiguousarray(done["pixel_values"], dtype=np.float32)


def _pixels(value: Any, name: str, where: str, error: type[InputError]) -> int | None:
    """Return a limit that an item has, None where it has none. Raises `error`."""
    if value is None:
        return None
    pixels = whole_number(value)
    if pixels is None or pixels < 1:
        raise error(f"{where} has {name} {format_value(value)}; it is a whole number, 1 or more.")
    return min(pixels, _MAX_PIXELS)
