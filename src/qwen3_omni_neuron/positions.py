"""Rope positions over three axes (time, height, width)."""

import torch
from torch import Tensor


def rope_positions(length: int) -> Tensor:
    """int64 [3, length] for text and audio, where the three axes count tokens alike.

    Source: transformers get_rope_index without image or video grids.
    """
    return torch.arange(length).expand(3, -1)
