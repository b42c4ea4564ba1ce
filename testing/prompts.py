"""Prompts of tokens, and images and videos of random pixels, for one part of the model alone."""

from pathlib import Path

import numpy as np
import torch

from qwen3_omni_neuron.checkpoint.json_files import read_preprocessor
from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from qwen3_omni_neuron.prompt.media.pixels import CHANNELS, Grid, PixelSettings, Visual
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt, rope_positions


def prompt_of(token_ids: torch.Tensor) -> Prompt:
    """Return a prompt of user tokens alone, without media."""
    talker = TalkerPrompt(token_ids, rope_positions(len(token_ids) + ASSISTANT_ROWS))
    return Prompt(token_ids, rope_positions(len(token_ids)), talker)


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
