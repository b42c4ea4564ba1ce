"""Images and videos of random pixels, for the vision encoder alone."""

from pathlib import Path

import numpy as np

from qwen3_omni_neuron.prompt.media.pixels import CHANNELS, Grid, PixelSettings, Visual
from qwen3_omni_neuron.prompt.preprocessor import read_preprocessor


def random_visual(folder: Path, grid: Grid) -> Visual:
    """Return an image or a video of this grid for the checkpoint in `folder`.

    Every call gives a grid the same pixels.
    """
    settings = PixelSettings.of(read_preprocessor(folder))
    frames, rows, columns = grid
    pictures = frames * settings.sizes.temporal_patch_size if frames > 1 else 1
    sides = rows * settings.sizes.patch_size, columns * settings.sizes.patch_size
    draw = np.random.default_rng(grid)
    return Visual(draw.integers(0, 256, (pictures, *sides, CHANNELS), np.uint8), settings)
