"""bfloat16 matrices stored losslessly in 12 bits a number: library.h's compact form.

A trained matrix has few exponents. Per output and 256 inputs, 16 exponents are encoded in 4 bits,
beside sign and mantissa; the block's head lists numbers with others. A matrix with too many of
these, or whose inputs are not a multiple of 4, has no compact form.

A panel of 32 outputs is a row of bytes: [..., out, into] becomes uint8 [..., ceil(out / 32), bytes
of a panel].
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.packing import PANEL

BLOCK_INPUTS = 256  # this and the following as in library.h
BLOCK_HEAD = 128
QUAD_BYTES = 3 * 2 * PANEL
"""Bytes of four inputs of a panel."""
_AT_ONCE = 1 << 20
"""Numbers that torch unpacks at a time, about 100 bytes each."""

# Output of each place of a row. Neighbours, halves of 32 bits, are 8 outputs apart, so that a shift
# and a mask give two float vectors.
OUTPUTS = [16 * (place // 16) + place % 16 // 2 + 8 * (place % 2) for place in range(PANEL)]


def compact_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix [..., out, into] in compact form."""
    *stack, out, into = shape
    panel = -(-into // BLOCK_INPUTS) * BLOCK_HEAD + into // 4 * QUAD_BYTES
    return (*stack, -(-out // PANEL), panel)


def _pieces(matrices: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(_AT_ONCE // matrices.shape[-1] // PANEL, 1) * PANEL
    for matrix, panels in zip(matrices, packed.view(-1, *packed.shape[-2:]), strict=True):
        yield from zip(matrix.split(rows), panels.split(rows // PANEL), strict=True)


def unpack_compact(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a compact form's matrix [..., out, into]; dtype: float32 widens it."""
    matrix = torch.empty(shape, dtype=dtype)
    for rows, panels in _pieces(matrix.view(-1, *shape[-2:]), packed):
        rows.copy_(_unpack_rows(panels, *rows.shape))
    return matrix


def _unpack_rows(packed: Tensor, out: int, into: int) -> Tensor:
    all_heads, all_quads = packed.tensor_split([-(-into // BLOCK_INPUTS) * BLOCK_HEAD], dim=1)
    heads = all_heads.split(BLOCK_HEAD, 1)
    quads = all_quads.split(BLOCK_INPUTS // 4 * QUAD_BYTES, 1)
    words = torch.cat([_unpack_block(*block) for block in zip(heads, quads, strict=True)], 1)
    rows = torch.empty_like(words)
    rows[..., OUTPUTS] = words
    return rows.transpose(-1, -2).reshape(-1, into)[:out].contiguous().view(torch.bfloat16)


def _unpack_block(head: Tensor, quads: Tensor) -> Tensor:
    lowest = head[:, :PANEL].to(torch.int32)[:, None]
    listed = head[:, PANEL:].contiguous().view(torch.int32).to(torch.int64)
    wide = quads.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    a, b, c = wide.view(len(head), -1, 3, PANEL).unbind(2)
    d = (a >> 4 & 0x780) | (b >> 8 & 0x78) | (c >> 12 & 7) | (c << 4 & 0x8000)
    words = torch.stack([a & 0x87FF, b & 0x87FF, c & 0x87FF, d], 2).flatten(1, 2)
    words = words + (lowest << 7)
    panel, index = (listed >= 0).nonzero(as_tuple=True)
    entries = listed[panel, index]
    places = words.flatten(1)
    inside = entries >> 16 < places.shape[1]  # as in C, for broken files
    places[panel[inside], (entries >> 16)[inside]] = (entries & 0xFFFF)[inside].to(torch.int32)
    return torch.where(words >= 0x8000, words - 0x10000, words).to(torch.int16)
