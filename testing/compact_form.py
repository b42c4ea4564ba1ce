"""Packing of bfloat16 matrices in 12 bits a number, in torch: the oracle of the C's."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.cpu.compact import BLOCK_INPUTS, OUTPUTS, compact_shape
from qwen3_omni_neuron.cpu.packing import PANEL

EXCEPTIONS = 24  # as in library.h
EXPONENTS = 16


def pack_compact(matrix: Tensor) -> Tensor | None:
    """Return the compact form of a bfloat16 matrix [..., out, into] in torch; None: it has none.

    The bytes are those of `pack_compact_in_c`.
    """
    out, into = matrix.shape[-2:]
    if into % 4 != 0:
        return None
    packed = [_pack_rows(rows) for rows in matrix.reshape(-1, out, into)]
    if any(panels is None for panels in packed):
        return None
    whole = torch.stack([panels for panels in packed if panels is not None])
    return whole.view(compact_shape(tuple(matrix.shape)))


def _pack_rows(matrix: Tensor) -> Tensor | None:
    """Pack rows [out, into]; see pack_compact."""
    bits = matrix.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    rows = F.pad(bits, (0, 0, 0, -len(bits) % PANEL)).unflatten(0, (-1, PANEL))
    words = rows[:, OUTPUTS].transpose(-1, -2)  # [panels, into, PANEL], bits by their places
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
