"""Addresses of tensors, packing and descriptions of weights for the library: library.h.

Structs are dicts of fields, which cffi checks. Keep their pointers' targets alive: see `Weights`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.compact import compact_shape
from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.packing import PANEL, Groups, grouped_shape, packed_shape, packed_type
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.decoder import Decoder
from qwen3_omni_neuron.model.layers import FeedForward
from qwen3_omni_neuron.model.moe import MoeFeedForward

NO_MEMORY, NO_SUCH_ROW = ffi.integer_const("NO_MEMORY"), ffi.integer_const("NO_SUCH_ROW")
UNSUITED = ffi.integer_const("UNSUITED")
TYPES = {
    torch.float32: ffi.integer_const("FLOAT32"),
    torch.bfloat16: ffi.integer_const("BFLOAT16"),
    torch.int8: ffi.integer_const("INT8"),
}
INT4, COMPACT = ffi.integer_const("INT4"), ffi.integer_const("COMPACT")
SCALE_TYPES = {
    torch.float32: ffi.integer_const("FLOAT32"),
    torch.bfloat16: ffi.integer_const("BFLOAT16"),
    torch.float16: ffi.integer_const("FLOAT16"),
}
assert ffi.integer_const("PANEL") == PANEL

Library = Any
"""The loaded library: a cffi object with the functions of library.h."""
Pointer = Any
"""A cffi pointer; keeps only memory of `ffi.new` alive."""
Fields = dict[str, Any]
"""A struct's fields by name."""
VOID, TABLE = ffi.typeof("void *"), ffi.typeof("Table *")


class UnsuitedError(ValueError):
    """The C does not accept weights of this type, shape or layout."""


class Weights:
    """Pointers to weights, which live as long as this object."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def __call__(self, weight: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Pointer:
        """Return a pointer to a weight. Raises UnsuitedError."""
        weight = weight.detach()
        try:
            pointer = pointer_to(weight, dtype, *shape)
        except ValueError as wrong:
            raise UnsuitedError(str(wrong)) from None
        self._held.append(weight)
        return pointer

    def array(self, struct: str, items: Sequence[Fields]) -> Pointer:
        """Return a pointer to adjacent structs."""
        self._held.append(ffi.new(f"{struct}[]", items))
        return self._held[-1]

    def matrix(
        self, owner: nn.Module, name: str, *shape: int, bias: Tensor | None = None
    ) -> Fields:
        """Describe a packed parameter of a module: see cpu.packing. Raises UnsuitedError.

        shape: [..., out, into] before packing; of a stack, its first matrix.
        """
        packed: Tensor = getattr(owner, name)
        scale: Tensor | None = getattr(owner, f"{name}_scale", None)
        groups: Groups | None = getattr(owner, f"{name}_groups", None)
        out, into = shape[-2:]
        fields = {"bias": ffi.NULL if bias is None else self(bias, out), "into": into, "out": out}
        if groups is not None:
            return fields | {
                "panels": self(packed, *grouped_shape(shape, groups), dtype=torch.uint8),
                "type": INT4,
                "group": groups.size,
                "scale_type": SCALE_TYPES[groups.scale],
            }
        if packed.dtype == torch.uint8:
            return fields | {
                "panels": self(packed, *compact_shape(shape), dtype=torch.uint8),
                "type": COMPACT,
            }
        if packed.dtype not in TYPES:
            raise UnsuitedError(f"the C takes no weights of {packed.dtype}")
        return fields | {
            "panels": self(packed, *packed_shape(shape), dtype=packed.dtype),
            "scale": ffi.NULL if scale is None else self(scale, *shape[:-1]),
            "type": TYPES[packed.dtype],
        }

    def packed(self, matrix: Tensor, library: Library) -> Fields:
        """Pack a matrix [..., out, into], compactly if possible, and describe it."""
        out, into = matrix.shape[-2:]
        form = pack_compact_in_c(matrix, library) if matrix.dtype == torch.bfloat16 else None
        packed = pack_in_c(matrix, library) if form is None else form
        return {
            "panels": self(packed, *packed.shape, dtype=packed.dtype),
            "into": into,
            "out": out,
            "type": TYPES[matrix.dtype] if form is None else COMPACT,
        }

    def table(self, rows: Tensor, *shape: int) -> Fields:
        """Describe a table of rows [..., width]. Raises UnsuitedError."""
        if rows.dtype not in (torch.float32, torch.bfloat16):
            raise UnsuitedError(f"the C looks up no rows of {rows.dtype}")
        pointer, width = self(rows, *shape, dtype=rows.dtype), shape[-1]
        count = rows.numel() // width
        return {"rows": pointer, "count": count, "width": width, "type": TYPES[rows.dtype]}


def empty_floats(*shape: int) -> Tensor:
    """Return a float32 tensor for the C to fill."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def address_of(tensor: Tensor) -> Pointer:
    """Return a tensor's address."""
    return ffi.cast(VOID, tensor.data_ptr())


def check_dense(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError for another type or shape, or a tensor that is not dense."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"the C takes {dtype} {list(shape)} on the CPU here, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"the C takes dense tensors, got strides {tensor.stride()}")


def pointer_to(tensor: Tensor, dtype: torch.dtype, *shape: int) -> Pointer:
    """Return the address of a dense tensor. Raises ValueError for another type or shape."""
    check_dense(tensor, dtype, *shape)
    return ffi.cast(VOID, tensor.data_ptr())


def table_of(rows: Tensor, count: int, width: int) -> Pointer:
    """Return a Table of float32 rows [count, width]. Raises ValueError."""
    pointer = pointer_to(rows, torch.float32, count, width)
    return ffi.new(TABLE, (pointer, count, width, TYPES[torch.float32]))


def check(status: int) -> None:
    """Raise MemoryError if a call could not allocate memory."""
    if status == NO_MEMORY:
        raise MemoryError("no memory for the rows of a call")


def pack_in_c(matrix: Tensor, library: Library, dtype: torch.dtype | None = None) -> Tensor:
    """Pack a matrix [..., out, into], as cpu.packing.pack."""
    stored = packed_type(matrix, dtype)
    packed = torch.empty(packed_shape(tuple(matrix.shape)), dtype=stored, device="cpu")
    widens = stored != matrix.dtype
    _pack(library.pack_matrices, packed, matrix, matrix.element_size(), widens)
    return packed


def pack_compact_in_c(matrix: Tensor, library: Library) -> Tensor | None:
    """Return the compact form of a bfloat16 matrix; None if it has none."""
    assert matrix.dtype == torch.bfloat16
    if matrix.shape[-1] % 4 != 0:
        return None
    packed = torch.empty(compact_shape(tuple(matrix.shape)), dtype=torch.uint8, device="cpu")
    status = _pack(library.pack_compact_matrices, packed, matrix)
    return None if status == UNSUITED else packed


def quantise_in_c(matrix: Tensor, library: Library, groups: Groups) -> Tensor:
    """Round a bfloat16 matrix [..., out, into] to int4 and pack it, as cpu.packing."""
    assert matrix.dtype == torch.bfloat16 and groups == Groups(groups.size)
    shape = grouped_shape(tuple(matrix.shape), groups)
    packed = torch.empty(shape, dtype=torch.uint8, device="cpu")
    _pack(library.quantise_matrices, packed, matrix, groups.size)
    return packed


def _pack(function: Any, packed: Tensor, matrix: Tensor, *more: int) -> int:
    """Fill a matrix's packed form by a library function. Returns its status."""
    matrix = matrix.contiguous()
    out, into = matrix.shape[-2:]
    count = matrix.numel() // (out * into)
    status: int = function(address_of(packed), address_of(matrix), count, out, into, *more)
    check(status)
    return status


def native_decoder(c: DecoderConfig, decoder: Decoder, weights: Weights) -> Fields:
    """Describe a decoder with its packed weights. Raises UnsuitedError."""
    return {
        "layers": len(decoder.layers),
        "hidden": c.hidden_size,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "ffn": c.ffn_width if c.moe is None else c.moe.expert_width,
        "experts": c.moe.experts if c.moe else 0,
        "chosen": c.moe.experts_per_token if c.moe else 0,
        "shared_ffn": c.moe.shared_expert_width if c.moe else 0,
        "normalized": bool(c.moe and c.moe.normalize_weights),
        "norm_eps": c.norm_eps,
        "layer": weights.array("Layer", [_layer(c, layer, weights) for layer in decoder.layers]),
        "norm": weights(decoder.norm.weight, c.hidden_size),
    }


def _layer(c: DecoderConfig, layer: Any, weights: Weights) -> Fields:
    attention, hidden, qk_heads = layer.attention, c.hidden_size, c.heads + c.kv_heads
    qkv_width = (qk_heads + c.kv_heads) * c.head_dim
    return {
        "attention_norm": weights(layer.attention_norm.weight, hidden),
        "qkv": weights.matrix(attention.qkv, "weight", qkv_width, hidden),
        "qk_norm": weights(attention.qk_norm.weight, qk_heads, c.head_dim),
        "out": weights.matrix(attention.out, "weight", hidden, c.heads * c.head_dim),
        "ffn_norm": weights(layer.ffn_norm.weight, hidden),
        **_feed_forward(c, layer.ffn, weights),
    }


def _feed_forward(c: DecoderConfig, ffn: FeedForward | MoeFeedForward, weights: Weights) -> Fields:
    """Return a layer's feed-forward matrices by Layer's names."""
    hidden = c.hidden_size
    if not isinstance(ffn, MoeFeedForward):
        return {
            "gate_up": weights.matrix(ffn.gate_up, "weight", 2, c.ffn_width, hidden),
            "down": weights.matrix(ffn.down, "weight", hidden, c.ffn_width),
        }
    assert c.moe is not None
    experts, width, shared_width = c.moe.experts, c.moe.expert_width, c.moe.shared_expert_width
    matrices = {
        "gate_up": weights.matrix(ffn, "gate_up", experts, 2, width, hidden),
        "down": weights.matrix(ffn, "down", experts, hidden, width),
        "router": weights.matrix(ffn.router, "weight", experts, hidden),
    }
    if ffn.shared is not None:
        shared = ffn.shared
        matrices |= {
            "shared_gate_up": weights.matrix(shared.ffn.gate_up, "weight", 2, shared_width, hidden),
            "shared_down": weights.matrix(shared.ffn.down, "weight", hidden, shared_width),
            "shared_gate": weights.matrix(shared.gate, "weight", 1, hidden),
        }
    return matrices
