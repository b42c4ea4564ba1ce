"""Images and video frames -> pixels in the vision encoder's input size, and its patches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.checkpoint.json_files import check_served
from qwen3_omni_neuron.errors import CheckpointError, ImageError, format_value
from qwen3_omni_neuron.prompt.media.sizes import Grid, Sizes

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

CHANNELS = 3
_BICUBIC = 3  # Pillow's number of the filter
# CLIP's training values, and the defaults of transformers' processor.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def resize(picture: "Image", size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize an RGB image to (height, width), uint8 [height, width, 3].

    An image that has the size already is unchanged, to the bit.
    """
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), resample=_BICUBIC)
    return np.asarray(picture)


@dataclass(frozen=True, eq=False)
class PixelSettings:
    """Settings of a checkpoint's image processor, with which it makes pixels.

    levels: float32 [256, 3], the input value for each level of each channel.
    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    sizes: Sizes
    levels: NDArray[np.float32]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "PixelSettings":
        """Read the settings of a preprocessor_config.json, with the defaults of transformers.

        Raises CheckpointError for settings that make no patches or are not supported.
        """
        served = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        check_served(settings, {**served, "resample": _BICUBIC})
        return cls(Sizes.of(settings), _levels(settings))

    def image(self, picture: "Image", grid: Grid) -> "Visual":
        """Resize an RGB image to a grid of patches."""
        return Visual(resize(picture, self.sizes.pixels(grid))[None], self)

    def video(self, frames: NDArray[np.uint8], grid: Grid) -> "Visual":
        """Resize frames, [n, height, width, 3], which must not change later, to a grid of patches.

        The last frame is repeated up to a multiple of temporal_patch_size.
        Frames are resized by Pillow here and by torchvision in the reference: both are bicubic with
        antialiasing, and a pixel differs by at most one of 256 levels.
        """
        from PIL import Image

        size, together = self.sizes.pixels(grid), self.sizes.temporal_patch_size
        n = -(-len(frames) // together) * together
        if frames.shape[:3] == (n, *size):
            return Visual(frames, self)
        pixels = np.empty((n, *size, CHANNELS), np.uint8)
        for index, frame in enumerate(frames):
            pixels[index] = resize(Image.fromarray(frame), size)
        pixels[len(frames) :] = pixels[len(frames) - 1]
        return Visual(pixels, self)

    def prepared(self, pixels: Any, where: str) -> "Visual":
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
        return Visual(pixels, self)


@dataclass(frozen=True, eq=False)
class Visual:
    """Image or video in the vision encoder's input size, as pixels.

    pixels: uint8 [pictures, height, width, 3]: temporal_patch_size pictures for each frame of the
    grid, or one picture for an image, which fills a frame alone. They never change.
    """

    pixels: NDArray[np.uint8]
    settings: PixelSettings

    @property
    def grid(self) -> Grid:
        """Frames, and rows and columns of patches in a frame."""
        pictures, height, width, _ = self.pixels.shape
        together, patch = self.settings.sizes.temporal_patch_size, self.settings.sizes.patch_size
        return -(-pictures // together), height // patch, width // patch

    def part(self, first: int, stop: int) -> "Visual":
        """Return the frames from `first` up to `stop`, without a copy."""
        together = self.settings.sizes.temporal_patch_size
        return Visual(self.pixels[first * together : stop * together], self.settings)

    def patches(self) -> "Tensor":
        """Return the patches, float32 [frames, patches in a frame, patch_values].

        They take four times the bytes of the pixels (eight times for an image), so call it on one
        `part` at a time. A patch is [channel, picture, y, x]; the patches of one token are
        adjacent.
        """
        import torch  # a process that only decodes and resizes does not need it

        frames, rows, columns = self.grid
        merge, patch = self.settings.sizes.merge_size, self.settings.sizes.patch_size
        # [frame, picture, token row, patch row, y, token column, patch column, x, channel] ->
        # [frame, token row, token column, patch row, patch column, channel, picture, y, x]
        cut = self.pixels.reshape(
            frames, -1, rows // merge, merge, patch, columns // merge, merge, patch, CHANNELS
        ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        cut = cut.reshape(frames, rows * columns, CHANNELS, -1, patch**2)
        shape = (*cut.shape[:3], self.settings.sizes.temporal_patch_size, patch**2)
        patches = torch.empty(shape, dtype=torch.float32)  # aligned, as in engines.process.mailbox
        for channel, levels in enumerate(self.settings.levels.T):
            patches.numpy()[:, :, channel] = levels.take(cut[:, :, channel])
        return patches.flatten(2)


def _levels(settings: dict[str, Any]) -> NDArray[np.float32]:
    """Return the input value for each of 256 levels, scaled and normalised as in transformers."""
    factor = settings.get("rescale_factor", 1 / 255)
    mean, std = settings.get("image_mean", _MEAN), settings.get("image_std", _STD)
    try:
        scaled = (np.arange(256, dtype=np.float64)[:, None] * factor).astype(np.float32)
        levels = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
        if levels.shape == (256, CHANNELS) and np.isfinite(levels).all():
            return levels
    except (TypeError, ValueError):
        pass
    raise CheckpointError(
        f"preprocessor_config.json has image_mean {format_value(mean)}, image_std "
        f"{format_value(std)} and rescale_factor {format_value(factor)}; {CHANNELS} numbers, "
        f"{CHANNELS} numbers above 0 and one number are needed."
    )
