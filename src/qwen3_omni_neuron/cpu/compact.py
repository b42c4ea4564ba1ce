"""bfloat16 matrices in 12 bits a number, without a loss: the compact form of library.h.

The numbers of a trained matrix have few exponents. For each output and 256 of its inputs, 16
exponents are written in 4 bits, beside sign and mantissa; the few numbers with other exponents are
listed in the head of their block. A matrix with too many of these has no compact form, nor has one
whose inputs are no multiple of 4.

A panel of 32 outputs is a row of bytes: [..., out, into] becomes uint8
[..., ceil(out / 32), bytes of a panel].
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.cpu.packing import PANEL

BLOCK_INPUTS = 256  # as all below in library.h
BLOCK_HEAD = 128
EXCEPTIONS = 24
QUAD_BYTES = 3 * 2 * PANEL
"""Bytes of four inputs of a panel."""
EXPONENTS = 16
_AT_ONCE = 1 << 20
"""Numbers that torch packs or unpacks at a time: it takes about 100 bytes for each."""

# Output of each place of a row. Neighbours, which are the halves of 32 bits, are 8 outputs apart: a
# shift and a mask give two vectors of floats.
_OUTPUTS = [16 * (place // 16) + place % 16 // 2 + 8 * (place % 2) for place in range(PANEL)]


def compact_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the compact form of a matrix [..., out, into]."""
    *stack, out, into = shape
    panel = -(-into // BLOCK_INPUTS) * BLOCK_HEAD + into // 4 * QUAD_BYTES
    return (*stack, -(-out // PANEL), panel)


def pack_compact(matrix: Tensor) -> Tensor | None:
    """Return the compact form of a bfloat16 matrix [..., out, into] in torch; None: it has none.

    The bytes are those of `pack_compact_in_c`.
    """
    out, into = matrix.shape[-2:]
    if into % 4 != 0:
        return None
    packed = torch.empty(compact_shape(tuple(matrix.shape)), dtype=torch.uint8)
    for rows, panels in _pieces(matrix.reshape(-1, out, into), packed):
        piece = _pack_rows(rows)
        if piece is None:
            return None
        panels.copy_(piece)
    return packed


def _pieces(matrices: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows at a time of matrices [count, out, into], and their panels."""
    rows = max(_AT_ONCE // matrices.shape[-1] // PANEL, 1) * PANEL
    for matrix, panels in zip(matrices, packed.view(-1, *packed.shape[-2:]), strict=True):
        yield from zip(matrix.split(rows), panels.split(rows // PANEL), strict=True)


def _pack_rows(matrix: Tensor) -> Tensor | None:
    """Pack rows [out, into]; see pack_compact."""
    bits = matrix.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    rows = F.pad(bits, (0, 0, 0, -len(bits) % PANEL)).unflatten(0, (-1, PANEL))
    words = rows[:, _OUTPUTS].transpose(-1, -2)  # [panels, into, PANEL], bits by their places
    heads, quads = [], []
    for block in words.split(BLOCK_INPUTS, 1):
        packed = _pack_block(block)
        if packed is None:
            return None
        heads.append(packed[0])
        quads.append(packed[1])
    return torch.cat(heads + quads, -1)


def _pack_block(words: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack a block of each panel, words [panels, inputs, PANEL].

    Returns the heads and the quads, uint8 [panels, bytes].
    """
    exponents = words >> 7 & 0xFF
    lowest = (exponents.amax(1) - (EXPONENTS - 1)).clamp(min=0)
    crowded = _outside(exponents, lowest).sum((1, 2)) > EXCEPTIONS
    lowest[crowded] = _best_lowest(exponents[crowded])
    outside = _outside(exponents, lowest)
    if (outside.sum((1, 2)) > EXCEPTIONS).any():
        return None
    panels, inputs, _ = words.shape
    panel, k, place = outside.nonzero(as_tuple=True)
    listed = torch.full((panels, EXCEPTIONS), -1, dtype=torch.int64)
    index = outside.flatten(1).cumsum(1).view(outside.shape)[outside] - 1  # in the list
    listed[panel, index] = ((k * PANEL + place) << 16) + words[outside]
    steps = torch.where(outside, 0, exponents - lowest[:, None])
    a, b, c, d = ((words & 0x807F) | (steps << 7)).view(panels, inputs // 4, 4, PANEL).unbind(2)
    # The fourth number fills bits 11 to 14 of the others: exponent, upper and lower mantissa, sign.
    a = a | (d >> 7 & 15) << 11
    b = b | (d >> 3 & 15) << 11
    c = c | (d & 7) << 12 | (d >> 15) << 11
    quads = torch.stack([a, b, c], 2)
    head = torch.cat([lowest.to(torch.uint8), _bytes(listed, torch.int32)], -1)
    return head, _bytes(quads, torch.int16)


def _outside(exponents: Tensor, lowest: Tensor) -> Tensor:
    steps = exponents - lowest[:, None]
    return (steps < 0) | (steps >= EXPONENTS)


def _best_lowest(exponents: Tensor) -> Tensor:
    """Return the lowest of the 16 exponents that most numbers have; the highest of equal ones."""
    counts = torch.zeros(len(exponents), 256, PANEL, dtype=torch.int32)
    counts.scatter_add_(1, exponents.long(), torch.ones_like(exponents))
    counts = counts.transpose(1, 2)
    inside = F.pad(counts.cumsum(-1), (1, 0))
    inside = inside[..., EXPONENTS:] - inside[..., :-EXPONENTS]
    return (inside.shape[-1] - 1 - inside.flip(-1).argmax(-1)).to(exponents.dtype)


def _bytes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers in the low bits of a type, as bytes [panels, ...]."""
    limit = 1 << (8 * dtype.itemsize)
    signed = torch.where(numbers >= limit // 2, numbers - limit, numbers).to(dtype)
    return signed.flatten(1).contiguous().view(torch.uint8)


def unpack_compact(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the matrix [..., out, into] of a compact form; dtype: float32 widens it."""
    matrix = torch.empty(shape, dtype=dtype)
    for rows, panels in _pieces(matrix.view(-1, *shape[-2:]), packed):
        rows.copy_(_unpack_rows(panels, *rows.shape))
    return matrix


def _unpack_rows(packed: Tensor, out: int, into: int) -> Tensor:
    """Return the bfloat16 rows [out, into] of panels."""
    all_heads, all_quads = packed.tensor_split([-(-into // BLOCK_INPUTS) * BLOCK_HEAD], dim=1)
    heads = all_heads.split(BLOCK_HEAD, 1)
    quads = all_quads.split(BLOCK_INPUTS // 4 * QUAD_BYTES, 1)
    words = torch.cat([_unpack_block(*block) for block in zip(heads, quads, strict=True)], 1)
    rows = torch.empty_like(words)
    rows[..., _OUTPUTS] = words
    return rows.transpose(-1, -2).reshape(-1, into)[:out].contiguous().view(torch.bfloat16)


def _unpack_block(head: Tensor, quads: Tensor) -> Tensor:
    """Return the words of blocks as `_pack_block` returns them, int16 [panels, inputs, PANEL]."""
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
    inside = entries >> 16 < places.shape[1]  # as in C; a broken file may have others
    places[panel[inside], (entries >> 16)[inside]] = (entries & 0xFFFF)[inside].to(torch.int32)
    return torch.where(words >= 0x8000, words - 0x10000, words).to(torch.int16)
