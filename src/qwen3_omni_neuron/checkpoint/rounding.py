"""Matrices of int8 with a float32 scale for each row: rounded, or as a checkpoint has them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import ShardReader
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.checkpoint.parameters import copy_piece
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm

LARGEST_INT8 = 127


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [..., out, into] to int8. Returns it and its scale, float32 [..., out].

    The largest weight of a row is 127. A stack is rounded one matrix at a time, which bounds the
    memory.
    """
    rounded = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scale = torch.empty(matrix.shape[:-1], dtype=torch.float32, device=matrix.device)
    stack = matrix.flatten(0, -3) if matrix.ndim > 2 else matrix.unsqueeze(0)
    flat = rounded.view(stack.shape), scale.view(stack.shape[:-1])
    # Instead of dividing by a number, a GPU multiplies by its reciprocal, which rounds otherwise.
    largest = torch.tensor(LARGEST_INT8, device=matrix.device)
    for one, to, by in zip(stack, *flat, strict=True):
        wide = one.float()
        by.copy_(wide.abs().amax(-1) / largest)
        # The clamp keeps a row of zeros at zero.
        to.copy_(wide.div(by.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_())
    return rounded, scale


def are_int8_rows(pieces: Sequence[Piece], quantised: Mapping[str, QuantisedForm]) -> bool:
    """Return whether stored matrices all have int8 numbers around 0 and a scale for a whole row.

    pieces: the stored matrices of a parameter. quantised: Checkpoint.quantised.
    """
    return all(p.name in quantised and quantised[p.name].has_int8_rows for p in pieces)


def read_int8_rows(
    shape: Sequence[int], pieces: Sequence[Piece], reader: ShardReader
) -> tuple[Tensor, Tensor]:
    """Read the published numbers of a parameter of this shape, whose pieces are int8 rows.

    Returns what `quantise` returns. Raises CheckpointError for another shape than config.json says.
    """
    numbers = torch.empty(shape, dtype=torch.int8)
    scale = torch.empty(shape[:-1], dtype=torch.float32)
    for piece in pieces:
        matrix = reader.numbers(piece.name)
        copy_piece(numbers, piece, matrix.numbers)
        scale[piece.region] = matrix.scale[:, 0].float()
    reader.trim()
    return numbers, scale
