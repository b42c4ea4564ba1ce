"""Width of the routed experts on each core, with the zeros that a profile pads them with."""

from dataclasses import dataclass

import torch

from qwen3_omni_neuron.graphs.parallel.cut import rank_width
from qwen3_omni_neuron.model.config import DecoderConfig

KERNEL_WIDTH = 256  # a core's part of an expert's width is a multiple of it in profile "fast"


@dataclass(frozen=True)
class ExpertWidths:
    """Sizes of a decoder's routed experts under a TP degree and a profile.

    width: of an expert. padded: with its zeros, on all cores together. nbytes: of all experts of
    all layers as they are; padded_nbytes: as the cores hold them.
    """

    width: int
    padded: int
    nbytes: int
    padded_nbytes: int


def expert_multiple(profile: str) -> int:
    """Return the number that a core's part of an expert's width is a multiple of."""
    return KERNEL_WIDTH if profile == "fast" else 1


def expert_widths(c: DecoderConfig, tp: int, profile: str, dtype: torch.dtype) -> ExpertWidths:
    """Return the padding that a profile asks for at a TP degree, and its cost over all cores."""
    assert c.moe is not None
    width = c.moe.expert_width
    padded = tp * rank_width(width, tp, expert_multiple(profile))
    column = 3 * c.hidden_size * c.moe.experts * c.layers * dtype.itemsize
    return ExpertWidths(width, padded, width * column, padded * column)
