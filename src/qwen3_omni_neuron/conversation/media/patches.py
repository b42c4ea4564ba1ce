"""Images and video frames -> the patches that the vision encoder takes.

The settings are those of the checkpoint's preprocessor_config.json. An item's tokens are counted
before memory is spent on it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.pixels import CHANNELS, PixelSettings
from qwen3_omni_neuron.conversation.media.sizes import USUAL, SizeLimits
from qwen3_omni_neuron.conversation.preprocessor import read_preprocessor
from qwen3_omni_neuron.conversation.prompt import Grid, Patches
from qwen3_omni_neuron.errors import VideoError

if TYPE_CHECKING:
    from PIL.Image import Image


class PatchMaker:
    """Maker of patches for one checkpoint, without state between calls.

    sizes: those of the checkpoint.
    Source: transformers Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor.
    """

    def __init__(self, folder: Path):
        """Load the settings of the checkpoint in `folder`.

        Raises CheckpointError where it has no usable preprocessor_config.json.
        """
        self._pixels = PixelSettings.of(read_preprocessor(folder))
        self.sizes = self._pixels.sizes

    def image(self, picture: "Image", where: str, asked: SizeLimits = USUAL) -> Patches:
        """Make the patches of an RGB image; grid[0] is 1. where: names the item in errors.

        Raises what Sizes.image_grid raises.
        """
        width, height = picture.size
        grid = self.sizes.image_grid(height, width, where, asked)
        alone = self._pixels.patches(picture.convert("RGB"), self.sizes.pixels(grid))
        # [place, channel, area] -> [place, channel, in patch, area]: a patch repeats the one image.
        repeated = np.repeat(alone[:, :, None], self.sizes.temporal_patch_size, axis=2)
        return Patches(torch.from_numpy(repeated.reshape(len(alone), -1)), grid)

    def video(self, frames: NDArray[np.uint8], where: str, asked: SizeLimits = USUAL) -> Patches:
        """Make the patches of uint8 frames [n, height, width, 3].

        grid[0] is n / temporal_patch_size; where that is not whole the last frame is repeated. The
        limits count the pixels of a frame; their defaults are 131,072 and 786,432.
        Pillow resizes the frames, torchvision those of the reference: both are bicubic with
        antialiasing, and a pixel differs by at most one of 256 levels.
        Raises VideoError for other frames, and what Sizes.video_grid raises.
        """
        shape = list(frames.shape)
        if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != CHANNELS or 0 in shape:
            raise VideoError(
                f"{where} has frames of {frames.dtype} {shape}. Give uint8 [n, height, width, 3]."
            )
        grid = self.sizes.video_grid(shape[0], shape[1], shape[2], where, asked)
        return Patches(torch.from_numpy(self._pairs(frames, grid)), grid)

    def _pairs(self, frames: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """Cut frames into patches that hold temporal_patch_size frames each."""
        from PIL import Image

        times, places, together = grid[0], grid[1] * grid[2], self.sizes.temporal_patch_size
        # [t, place, channel, in patch, area]
        patches = np.empty(
            (times, places, CHANNELS, together, self.sizes.patch_size**2), np.float32
        )
        for index in range(times * together):
            frame = Image.fromarray(frames[min(index, len(frames) - 1)])
            alone = self._pixels.patches(frame, self.sizes.pixels(grid))
            patches[index // together, :, :, index % together] = alone
        return patches.reshape(times * places, -1)
