"""Pixels of an image -> numbers for the vision encoder, by the checkpoint's settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.sizes import Sizes
from qwen3_omni_neuron.conversation.preprocessor import check_served
from qwen3_omni_neuron.errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image

CHANNELS = 3
_BICUBIC = 3  # Pillow's number of the filter
# What CLIP was trained with, and the defaults of transformers' processor.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def resize(picture: "Image", size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize an RGB image to (height, width), uint8 [height, width, 3].

    An image that has the size already stays as it is, to the bit.
    """
    height, width = size
    return np.asarray(picture.resize((width, height), resample=_BICUBIC))


@dataclass(frozen=True, eq=False)
class PixelSettings:
    """Settings of a checkpoint's image processor.

    levels: float32 [256, 3], the number for each level of each channel.
    """

    sizes: Sizes
    levels: NDArray[np.float32]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "PixelSettings":
        """Read those of a preprocessor_config.json, with the defaults of transformers.

        Raises CheckpointError for settings that make no patches or are not supported.
        """
        served = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        check_served(settings, {**served, "resample": _BICUBIC})
        return cls(Sizes.of(settings), _levels(settings))

    def patches(self, picture: "Image", size: tuple[int, int]) -> NDArray[np.float32]:
        """Resize an RGB image to (height, width) and cut it into patches.

        Returns float32 [patches, 3, patch_size**2]; the patches that become one token are
        neighbours.
        """
        height, width = size
        resized = resize(picture, size)
        values = np.take_along_axis(self.levels, resized.reshape(-1, CHANNELS), axis=0)
        merge, patch = self.sizes.merge_size, self.sizes.patch_size
        unit = merge * patch
        # [H, W, channel] -> [token row, token column, patch row, patch column, channel, y, x]
        cut = values.reshape(
            height // unit, merge, patch, width // unit, merge, patch, CHANNELS
        ).transpose(0, 3, 1, 4, 6, 2, 5)
        return cut.reshape(-1, CHANNELS, patch**2)


def _levels(settings: dict[str, Any]) -> NDArray[np.float32]:
    """Return the number for each of 256 levels, scaled and normalised as transformers does it."""
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
        f"preprocessor_config.json has image_mean {mean!r}, image_std {std!r} and rescale_factor "
        f"{factor!r}; {CHANNELS} numbers, {CHANNELS} numbers above 0 and one number are needed."
    )
