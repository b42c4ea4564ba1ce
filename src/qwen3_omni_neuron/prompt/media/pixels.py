"""Images and video frames -> the vision encoder's input size, and patches.

torch is imported late: processes that only decode don't need it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.checkpoint.json_files import check_served, whole_setting
from qwen3_omni_neuron.errors import (
    CheckpointError,
    ImageError,
    InputError,
    PromptTooLongError,
    VideoError,
    format_value,
)
from qwen3_omni_neuron.prompt.media.fields import MOST_PIXELS
from qwen3_omni_neuron.prompt.media.image import MAX_ASPECT

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches in a frame."""
PixelLimits = tuple[int, float]
LOW_TOKENS = 256
"""Upper bound of an image's tokens at `detail` "low"."""
LOW_FRAME_TOKENS = 128
"""Upper bound of a frame's tokens at `detail` "low"."""
_MOST_PATCH = 1024  # side of a patch; usual: 16 pixels
# Per video frame; set by transformers' Qwen3OmniMoeProcessor, not by the checkpoint.
_VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)
_TOGETHER = 2  # qwen-omni-utils' FRAME_FACTOR, which divides total_pixels
# qwen-omni-utils' bounds of resized_height and resized_width, in tokens.
_RESIZED_TOKENS = (4, 16384)


@dataclass(frozen=True)
class SizeLimits:
    """Limits of an item's size after resizing; None: the default. See prompt.media.fields."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    detail: str | None = None

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> "SizeLimits":
        """Return the limits in a message item's fields."""
        return cls(**{name: item.get(name) for name in SIZE_FIELDS})


SIZE_FIELDS = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    "detail",
)
"""Fields of an image or video item that determine its size in tokens."""
USUAL = SizeLimits()


@dataclass(frozen=True)
class VisualSize:
    """Size of an image or video before it is decoded.

    height, width: in pixels. frames: None for an image. where: name of the item in errors.
    most_tokens: the context's.
    """

    where: str
    height: int
    width: int
    frames: int | None = None
    asked: SizeLimits = USUAL
    most_tokens: int | None = None

    @property
    def error(self) -> type[InputError]:
        """Class of errors about it."""
        return ImageError if self.frames is None else VideoError


@dataclass(frozen=True)
class Sizes:
    """Sizes of patches and images in a checkpoint's preprocessor_config.json.

    patch_size: side in pixels. merge_size: patches along a token's side. temporal_patch_size:
    frames in a patch. min_pixels, max_pixels: limits of a resized image.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Sizes":
        """Read preprocessor_config.json's settings, with transformers' defaults."""
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
            whole_setting(settings, "patch_size", 14, _MOST_PATCH),
            whole_setting(settings, "merge_size", 2, _MOST_PATCH),
            whole_setting(settings, "temporal_patch_size", 2, _MOST_PATCH),
            whole_setting(limits, "min_pixels", 0, MOST_PIXELS),
            whole_setting(limits, "max_pixels", 0, MOST_PIXELS),
        )

    def grid(self, size: VisualSize) -> Grid:
        """Return the patch grid of an image or video, frames in groups.

        Raises ImageError or VideoError for an unusable size, and PromptTooLongError.
        """
        height, width = size.height, size.width
        if height < 1 or width < 1:
            raise size.error(f"{size.where} is {width} x {height} pixels: it is empty.")
        made = self._asked_size(size) or self._resized(size, height, width, self._limits(size))
        groups = 1 if size.frames is None else -(-size.frames // self.temporal_patch_size)
        grid = groups, made[0] // self.patch_size, made[1] // self.patch_size
        tokens = self.tokens(grid)
        if size.most_tokens is not None and tokens > size.most_tokens:
            raise PromptTooLongError(
                f"{size.where} has {tokens} tokens, but the context fits at most "
                f"{size.most_tokens}. Lower its max_pixels or min_pixels, or load with a larger "
                "context_length."
            )
        return grid

    def tokens(self, grid: Grid) -> int:
        """Count the tokens of a grid of patches."""
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def pixels(self, grid: Grid) -> tuple[int, int]:
        """Return the height and width in pixels of a grid."""
        return grid[1] * self.patch_size, grid[2] * self.patch_size

    @property
    def _token_pixels(self) -> int:
        return (self.patch_size * self.merge_size) ** 2

    def _resized(
        self, size: VisualSize, height: int, width: int, limits: PixelLimits
    ) -> tuple[int, int]:
        """Return the resized height and width. Source: transformers smart_resize."""
        aspect = max(height, width) / min(height, width)
        if aspect > MAX_ASPECT:
            raise size.error(
                f"{size.where} is {width} x {height} pixels: one side is {aspect:.1f} times the "
                f"other; the limit is {MAX_ASPECT} times. Crop it."
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

    def _asked_size(self, size: VisualSize) -> tuple[int, int] | None:
        """Return the size of resized_height and resized_width, or None.

        Source: qwen-omni-utils.
        """
        height, width = size.asked.resized_height, size.asked.resized_width
        if height is None or width is None:
            return None
        low, high = (tokens * self._token_pixels for tokens in _RESIZED_TOKENS)
        made = self._resized(size, height, width, (low, high))
        unit = self.patch_size * self.merge_size
        # qwen-omni-utils rounds a side to 1 token or more; transformers to 0, then enlarges it.
        nearest = max(1, round(height / unit)) * unit, max(1, round(width / unit)) * unit
        return nearest if low <= nearest[0] * nearest[1] <= high else made

    def _limits(self, size: VisualSize) -> PixelLimits:
        usual = (self.min_pixels, self.max_pixels) if size.frames is None else _VIDEO_LIMITS
        asked, total = size.asked, size.asked.total_pixels
        low = usual[0] if asked.min_pixels is None else asked.min_pixels
        high: float = usual[1] if asked.max_pixels is None else asked.max_pixels
        if low > high:
            # One passed limit contradicts the other's default. A minimum equal to the maximum would
            # enlarge an image and round it up beyond: use 1.
            low, high = (low, low) if asked.max_pixels is None else (1, high)
        if size.frames is not None and total is not None:
            frames = -(-size.frames // self.temporal_patch_size) * self.temporal_patch_size
            each = max(min(usual[1], total / frames * _TOGETHER), int(low * 1.05))
            high = each if asked.max_pixels is None else min(high, each)
        if asked.detail == "low":
            most = LOW_TOKENS if size.frames is None else LOW_FRAME_TOKENS
            high = min(high, most * self._token_pixels)
            # Smaller images are enlarged and rounded up: leave a margin.
            low = min(low, int(high) // (2 if asked.min_pixels is None else 1))
        return low, high


@dataclass(frozen=True)
class MediaSettings:
    """Settings of a checkpoint for decoding media. audio_rate: in Hz."""

    audio_rate: int
    audio_tokens_per_s: float
    sizes: Sizes


CHANNELS = 3
_BICUBIC = 3
# CLIP's training values, the defaults of transformers' processor.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def resize(picture: "Image", size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize an RGB image to (height, width), uint8 [height, width, 3], if necessary."""
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), resample=_BICUBIC)
    return np.asarray(picture)


@dataclass(frozen=True, eq=False)
class PixelSettings:
    """Settings of a checkpoint's image processor. levels: float32 [256, 3], input values.

    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    sizes: Sizes
    levels: NDArray[np.float32]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "PixelSettings":
        """Read preprocessor_config.json's settings. Raises CheckpointError."""
        served = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        check_served(settings, {**served, "resample": _BICUBIC})
        return cls(Sizes.of(settings), _levels(settings))

    def image(self, picture: "Image", grid: Grid) -> "Visual":
        """Resize an RGB image to a grid of patches."""
        return Visual(resize(picture, self.sizes.pixels(grid))[None], self)

    def video(self, frames: NDArray[np.uint8], grid: Grid) -> "Visual":
        """Resize immutable frames, uint8 [n, height, width, 3], to a grid.

        Repeats the last frame up to a multiple of temporal_patch_size. Pillow and the reference's
        torchvision differ by at most one of 256 levels.
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


@dataclass(frozen=True, eq=False)
class Visual:
    """Image or video in the vision encoder's input size.

    pixels: uint8 [pictures, height, width, 3], immutable: temporal_patch_size pictures per frame of
    the grid, or one picture of an image.
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
        """Return the frames [first, stop), without a copy."""
        together = self.settings.sizes.temporal_patch_size
        return Visual(self.pixels[first * together : stop * together], self.settings)

    def patches(self) -> "Tensor":
        """Return the patches, float32 [frames, patches in a frame, patch_values].

        They take four times the pixels' bytes (images: eight): call it on one `part` at a time. A
        patch is [channel, picture, y, x]; the patches of one token are adjacent.
        """
        import torch

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
    """Return the normalised values of 256 levels, as in transformers."""
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
