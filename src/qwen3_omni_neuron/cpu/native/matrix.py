"""Packing of matrices in C."""

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import Library, address_of, check
from qwen3_omni_neuron.cpu.packing import Groups, grouped_shape, packed_shape, packed_type


def pack_in_c(matrix: Tensor, library: Library, dtype: torch.dtype | None = None) -> Tensor:
    """Pack a matrix [..., out, into]; see cpu.packing.pack, whose result is the same."""
    matrix, stored = matrix.contiguous(), packed_type(matrix, dtype)
    out, into = matrix.shape[-2:]
    packed = torch.empty(packed_shape(tuple(matrix.shape)), dtype=stored, device="cpu")
    status = library.pack_matrices(
        address_of(packed),
        address_of(matrix),
        matrix.numel() // (out * into),
        out,
        into,
        matrix.element_size(),
        stored != matrix.dtype,
    )
    check(status)
    return packed


def quantise_in_c(matrix: Tensor, library: Library, groups: Groups) -> Tensor:
    """Round a bfloat16 matrix [..., out, into] to int4 and pack it.

    The result is that of cpu.packing.quantise_groups and pack_groups.
    """
    assert matrix.dtype == torch.bfloat16 and groups == Groups(groups.size)
    matrix = matrix.contiguous()
    out, into = matrix.shape[-2:]
    shape = grouped_shape(tuple(matrix.shape), groups)
    packed = torch.empty(shape, dtype=torch.uint8, device="cpu")
    status = library.quantise_matrices(
        address_of(packed),
        address_of(matrix),
        matrix.numel() // (out * into),
        out,
        into,
        groups.size,
    )
    check(status)
    return packed
