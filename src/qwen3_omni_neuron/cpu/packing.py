"""Matrices in the C's layout: panels of 32 outputs, in float32, bfloat16 or int8.

[..., out, into] becomes [..., ceil(out / 32), into, 32], with zeros after the last output. A
gate_up matrix [..., 2 width, into] is packed as two, [..., 2, width, into]. An int8 matrix has a
float32 scale for each output: the largest weight of a row is 127.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 32  # as in library.h
LARGEST_INT8 = 127


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a packed matrix [..., out, into]."""
    *stack, out, into = shape
    return (*stack, -(-out // PANEL), into, PANEL)


def packed_type(matrix: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type that a matrix is packed in: see `pack`."""
    widen = matrix.dtype == torch.bfloat16 and dtype == torch.float32
    assert widen or dtype in (None, matrix.dtype), f"{matrix.dtype} can't be packed as {dtype}"
    return dtype or matrix.dtype


def pack(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack a matrix [..., out, into] in torch.

    dtype: float32 widens bfloat16 on the way; None keeps the matrix's.
    """
    matrix = matrix.to(packed_type(matrix, dtype))
    padded = F.pad(matrix, (0, 0, 0, -matrix.shape[-2] % PANEL))
    return padded.unflatten(-2, (-1, PANEL)).transpose(-1, -2).contiguous()


def unpack(packed: Tensor, out: int) -> Tensor:
    """Return the matrix [..., out, into] that was packed."""
    return packed.transpose(-1, -2).flatten(-3, -2)[..., :out, :].contiguous()


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [..., out, into] to int8. Returns it and its scale, float32 [..., out].

    A stack is rounded one matrix at a time, which bounds the memory.
    """
    rounded = torch.empty(matrix.shape, dtype=torch.int8, device="cpu")
    scale = torch.empty(matrix.shape[:-1], dtype=torch.float32, device="cpu")
    stack = matrix.flatten(0, -3) if matrix.ndim > 2 else matrix.unsqueeze(0)
    flat = rounded.view(stack.shape), scale.view(stack.shape[:-1])
    for one, to, by in zip(stack, *flat, strict=True):
        wide = one.float()
        by.copy_(wide.abs().amax(-1) / LARGEST_INT8)
        # The clamp keeps a row of zeros at zero.
        to.copy_(wide.div(by.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_())
    return rounded, scale
