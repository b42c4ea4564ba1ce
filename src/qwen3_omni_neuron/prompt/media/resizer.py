"""Images and video frames -> pixels in the vision encoder's input size.

The settings come from the checkpoint's preprocessor_config.json. An item's tokens are counted
before memory is allocated for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import ImageError, VideoError
from qwen3_omni_neuron.prompt.media.pixels import CHANNELS, PixelSettings, Visual, resize
from qwen3_omni_neuron.prompt.media.preprocessor import read_preprocessor
from qwen3_omni_neuron.prompt.media.sizes import USUAL, Grid, SizeLimits

if TYPE_CHECKING:
    from PIL.Image import Image


class Resizer:
    """Resizer of images and videos for one checkpoint's patches, without state between calls.

    sizes: the checkpoint's sizes.
    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    def __init__(self, folder: Path):
        """Load the settings of the checkpoint in `folder`.

        Raises CheckpointError if it has no usable preprocessor_config.json.
        """
        self._pixels = PixelSettings.of(read_preprocessor(folder))
        self.sizes = self._pixels.sizes

    def image(self, picture: "Image", where: str, asked: SizeLimits = USUAL) -> Visual:
        """Resize an RGB image. where: name of the item in errors.

        Raises the errors of Sizes.image_grid.
        """
        width, height = picture.size
        return self.in_grid(picture, self.sizes.image_grid(height, width, where, asked))

    def in_grid(self, picture: "Image", grid: Grid) -> Visual:
        """Resize an RGB image to a grid of patches."""
        return Visual(resize(picture, self.sizes.pixels(grid))[None], self._pixels)

    def video(self, frames: NDArray[np.uint8], where: str, asked: SizeLimits = USUAL) -> Visual:
        """Resize uint8 frames [n, height, width, 3], which must not change later.

        The last frame is repeated up to a multiple of temporal_patch_size. The limits count the
        pixels of a frame; their defaults are 131,072 and 786,432.
        Frames are resized by Pillow here and by torchvision in the reference: both are bicubic with
        antialiasing, and a pixel differs by at most one of 256 levels.
        Raises VideoError for other frames, and the errors of Sizes.video_grid.
        """
        shape = list(frames.shape)
        if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != CHANNELS or 0 in shape:
            raise VideoError(
                f"{where} has frames of {frames.dtype} {shape}. Give uint8 [n, height, width, 3]."
            )
        grid = self.sizes.video_grid(shape[0], shape[1], shape[2], where, asked)
        return Visual(self._resized(frames, grid), self._pixels)

    def prepared(self, pixels: Any, where: str) -> Visual:
        """Return pixels that `image` or `video` has made, as they are.

        pixels: uint8 [pictures, height, width, 3]. Raises ImageError for what neither has made.
        """
        sizes, array = self.sizes, isinstance(pixels, np.ndarray)
        shape = list(pixels.shape) if array else []
        if not array or pixels.dtype != np.uint8 or len(shape) != 4 or shape[3] != CHANNELS:
            raise ImageError(f"{where} has no pixels, uint8 [pictures, height, width, 3].")
        pictures, height, width, _ = shape
        unit = sizes.patch_size * sizes.merge_size
        if 0 in shape or height % unit or width % unit:
            raise ImageError(
                f"{where} has pictures of {width} x {height} pixels; this checkpoint takes "
                f"multiples of {unit}."
            )
        if pictures != 1 and pictures % sizes.temporal_patch_size:
            raise ImageError(
                f"{where} has {pictures} pictures; one, or a multiple of "
                f"{sizes.temporal_patch_size} is taken."
            )
        return Visual(pixels, self._pixels)

    def _resized(self, frames: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """Resize frames, and repeat the last one if the grid has more frames."""
        from PIL import Image

        size, n = self.sizes.pixels(grid), grid[0] * self.sizes.temporal_patch_size
        if frames.shape[:3] == (n, *size):
            return frames
        pixels = np.empty((n, *size, CHANNELS), np.uint8)
        for index, frame in enumerate(frames):
            pixels[index] = resize(Image.fromarray(frame), size)
        pixels[len(frames) :] = pixels[len(frames) - 1]
        return pixels
