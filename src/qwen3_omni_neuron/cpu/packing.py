"""Matrices in the C's layout: panels of 32 outputs in float32, bfloat16, int8 or int4.

[..., out, into] becomes [..., ceil(out / 32), into, 32], with zeros after the last output. A
gate_up matrix [..., 2 width, into] is packed as two. An int8 matrix has a float32 scale per output:
a row's largest weight is 127.

An int4 matrix has a signed scale per output and group of inputs: a weight is scale * number, -8 to
7. A panel has one block a group, uint8 [..., ceil(out / 32), ceil(into / group), bytes of a block];
library.h describes blocks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 32  # as in library.h
INT4_STEPS = tuple(-7 - n / 8 for n in range(22))
"""Values that `quantise_groups` tries for a group's largest weight."""


@dataclass(frozen=True)
class Groups:
    """Format of an int4 matrix. size: inputs of a group, a multiple of 32. scale: a float type."""

    size: int = 32
    scale: torch.dtype = torch.bfloat16

    @property
    def number_bytes(self) -> int:
        """Bytes of a block's numbers."""
        return self.size * PANEL // 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: numbers and scales."""
        return self.number_bytes + PANEL * self.scale.itemsize


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a packed matrix [..., out, into]."""
    *stack, out, into = shape
    return (*stack, -(-out // PANEL), into, PANEL)


def packed_type(matrix: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return a packed matrix's dtype: see `pack`."""
    widen = matrix.dtype == torch.bfloat16 and dtype == torch.float32
    assert widen or dtype in (None, matrix.dtype), f"{matrix.dtype} can't be packed as {dtype}"
    return dtype or matrix.dtype


def pack(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack a matrix [..., out, into] in torch. dtype: float32 widens bfloat16."""
    matrix = matrix.to(packed_type(matrix, dtype))
    padded = F.pad(matrix, (0, 0, 0, -matrix.shape[-2] % PANEL))
    return padded.unflatten(-2, (-1, PANEL)).transpose(-1, -2).contiguous()


def unpack(packed: Tensor, out: int) -> Tensor:
    """Return a packed matrix's [..., out, into]."""
    return packed.transpose(-1, -2).flatten(-3, -2)[..., :out, :].contiguous()


def grouped_shape(shape: tuple[int, ...], groups: Groups) -> tuple[int, ...]:
    """Return the shape of a packed int4 matrix [..., out, into]."""
    *stack, out, into = shape
    return (*stack, -(-out // PANEL), -(-into // groups.size), groups.block_bytes)


def quantise_groups(matrix: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Round a bfloat16 matrix [..., out, into] to int4.

    Returns numbers, int8 [..., out, into], and scales [..., out, ceil(into / size)]. A group's
    largest weight becomes each of INT4_STEPS in turn, the others the nearest numbers; the step with
    the least squared error under its best scale wins.
    """
    assert matrix.dtype == torch.bfloat16 and groups.scale == torch.bfloat16
    if matrix.ndim > 2:
        parts = [quantise_groups(one, groups) for one in matrix]
        return torch.stack([n for n, _ in parts]), torch.stack([s for _, s in parts])
    into = matrix.shape[-1]
    padded = F.pad(matrix.float(), (0, -into % groups.size)).unflatten(-1, (-1, groups.size))
    most, least = padded.amax(-1), padded.amin(-1)
    largest = torch.where(most > -least, most, least)
    best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
    for step in INT4_STEPS:
        # Dividing by a number would multiply by its reciprocal, unlike the C.
        per_step = torch.tensor(step) / largest
        # NaN if all weights are zero: the comparison below is false.
        numbers = _nearest(padded * per_step.unsqueeze(-1))
        # These sums are exact in any order: see quantise of vector_kernels.h.
        products, squares = (padded * numbers).sum(-1), numbers.square().sum(-1)
        gain = products * products / squares
        scale = torch.where(gain > best, products / squares, scale)
        best = torch.where(gain > best, gain, best)
    kept = scale.to(groups.scale)
    numbers = _nearest(padded / kept.float().unsqueeze(-1))
    numbers = torch.where(kept.unsqueeze(-1) == 0, 0, numbers)
    return numbers.to(torch.int8).flatten(-2)[..., :into].contiguous(), kept


def _nearest(x: Tensor) -> Tensor:
    return x.round_().clamp_(-8, 7)


def pack_groups(numbers: Tensor, scale: Tensor, groups: Groups) -> Tensor:
    """Pack an int4 matrix in torch. Returns uint8 of `grouped_shape`.

    numbers: int8 [..., out, into], -8 to 7; scale: [..., out, ceil(into / size)].
    """
    outs, inputs = -numbers.shape[-2] % PANEL, -numbers.shape[-1] % groups.size
    padded = (F.pad(numbers, (0, inputs, 0, outs)) + 8).view(torch.uint8)
    # Two numbers a byte, low bits first; eight make a word of the C.
    joined = padded[..., ::2] | (padded[..., 1::2] << 4)
    words = joined.view(torch.int32).unflatten(-2, (-1, PANEL))
    by_group = words.unflatten(-1, (-1, groups.size // 8)).movedim(-3, -1)
    # [..., panels, groups, words of a group, PANEL]
    block = by_group.flatten(-2).contiguous().view(torch.uint8)
    scales = F.pad(scale, (0, 0, 0, outs)).unflatten(-2, (-1, PANEL)).transpose(-1, -2)
    return torch.cat([block, scales.contiguous().view(torch.uint8)], -1)


def unpack_groups(packed: Tensor, out: int, into: int, groups: Groups) -> Tensor:
    """Return a packed int4 matrix's weights, float32 [..., out, into]."""
    numbers, scales = packed.split([groups.number_bytes, PANEL * groups.scale.itemsize], -1)
    words = numbers.contiguous().view(torch.int32).unflatten(-1, (-1, PANEL, 1))
    shifts = torch.arange(28, -1, -4, dtype=torch.int32)
    wide = ((words << shifts) >> 28 & 15) - 8  # [..., panels, groups, words of a group, PANEL, 8]
    wide = wide.movedim(-2, -4).flatten(-2).float()  # [..., panels, PANEL, groups, size]
    wide *= scales.contiguous().view(groups.scale).float().transpose(-1, -2).unsqueeze(-1)
    return wide.flatten(-2).flatten(-3, -2)[..., :out, :into].contiguous()
