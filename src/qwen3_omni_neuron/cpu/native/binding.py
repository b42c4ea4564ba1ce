"""Pointers, structures and call signatures of the compiled library (see cpu.native.installed)."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native.matrix import PANEL, TYPES, packed_shape
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.decoder import Decoder
from qwen3_omni_neuron.model.layers import FeedForward
from qwen3_omni_neuron.model.moe import MoeFeedForward

NO_MEMORY, NO_SUCH_ROW = 1, 2  # as in status.h

Number, Pointer = ctypes.c_int64, ctypes.c_void_p


class UnsuitedError(ValueError):
    """The C can't take these weights: they have another type, shape or layout."""


class MismatchError(Exception):
    """A library that was not compiled from these sources."""


def declare_calls(library: ctypes.CDLL) -> None:
    """Set the argument types of the library's calls. Raises AttributeError where one is missing."""
    library.decode_step.argtypes = [Pointer, Number, *[Pointer] * 8]
    library.prefill.argtypes = [
        Pointer, *[Number] * 3, *[Pointer] * 3, Number, *[Pointer] * 2, Number, *[Pointer] * 3,
    ]  # fmt: skip
    library.predict_frame.argtypes = [Pointer, Number, *[Pointer] * 5, Number, *[Pointer] * 3]
    library.draw_rows.argtypes = [Number, Pointer, Number, *[Pointer] * 3]
    library.multiply_rows.argtypes = [Pointer, Number, Pointer, Number, Pointer, Number]
    library.pack_matrices.argtypes = [Pointer, Pointer, *[Number] * 4, ctypes.c_int]
    library.grow_pool.argtypes = [Number]
    library.grow_pool.restype = None
    library.run_code2wav.argtypes = [Pointer, Number, Pointer, Number, *[Pointer] * 4]
    library.convolve_audio.argtypes = [Pointer, Number, Number, Pointer, Pointer]
    library.code2wav_state_size.argtypes = [Pointer]
    library.code2wav_state_size.restype = Number


class Matrix(ctypes.Structure):
    """Matrix of matrix.h."""

    _fields_ = [
        *((name, Pointer) for name in ("panels", "scale", "bias")),
        *((name, Number) for name in ("into", "out", "type")),
    ]


class Table(ctypes.Structure):
    """Table of matrix.h."""

    _fields_ = [("rows", Pointer), *((name, Number) for name in ("count", "width", "type"))]


class Weights:
    """Pointers to weights. The weights are not freed as long as this object exists."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __call__(self, weight: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """Return a pointer to a weight. Raises UnsuitedError for another type, shape or layout."""
        weight = weight.detach()
        try:
            pointer = pointer_to(weight, dtype, *shape)
        except ValueError as wrong:
            raise UnsuitedError(str(wrong)) from None
        self._held.append(weight)
        return pointer

    def matrix(
        self, owner: nn.Module, name: str, *shape: int, bias: Tensor | None = None
    ) -> Matrix:
        """Describe a packed parameter of a module: see cpu.native.matrix.

        shape: shape [..., out, into] of the matrix before packing. For a stack, the first matrix is
        described, and the others follow in memory. Raises UnsuitedError.
        """
        packed: Tensor = getattr(owner, name)
        scale: Tensor | None = getattr(owner, f"{name}_scale", None)
        if packed.dtype not in TYPES:
            raise UnsuitedError(f"the C takes no weights of {packed.dtype}")
        out, into = shape[-2:]
        return Matrix(
            panels=self(packed, *packed_shape(shape), dtype=packed.dtype),
            scale=None if scale is None else self(scale, *shape[:-1]),
            bias=None if bias is None else self(bias, out),
            into=into,
            out=out,
            type=TYPES[packed.dtype],
        )

    def table(self, rows: Tensor, *shape: int) -> Table:
        """Describe a table of rows [..., width]. Raises UnsuitedError."""
        if rows.dtype not in (torch.float32, torch.bfloat16):
            raise UnsuitedError(f"the C looks up no rows of {rows.dtype}")
        pointer = self(rows, *shape, dtype=rows.dtype)
        width = shape[-1]
        return Table(pointer, rows.numel() // width, width, TYPES[rows.dtype])


def empty_floats(*shape: int) -> Tensor:
    """Return a tensor for the C to fill, whatever type and device torch has as its defaults."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def pointer_to(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Return the address of a dense tensor. Raises ValueError for another type or shape."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"the C takes {dtype} {list(shape)} on the CPU here, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"the C takes dense tensors, got strides {tensor.stride()}")
    return tensor.data_ptr()


def table_of(rows: Tensor, count: int, width: int) -> Table:
    """Describe a float32 table [count, width]. Raises ValueError for another type or shape."""
    return Table(pointer_to(rows, torch.float32, count, width), count, width, TYPES[torch.float32])


def check(status: int) -> None:
    """Raise MemoryError where a call could not allocate memory."""
    if status == NO_MEMORY:
        raise MemoryError("no memory for the rows of a call")


class Layer(ctypes.Structure):
    """Layer of decoder.h."""

    _fields_ = [
        ("attention_norm", Pointer),
        ("qkv", Matrix),
        ("qk_norm", Pointer),
        ("out", Matrix),
        ("ffn_norm", Pointer),
        *((name, Matrix) for name in (
            "gate_up", "down", "router", "shared_gate_up", "shared_down", "shared_gate",
        )),
    ]  # fmt: skip


class NativeDecoder(ctypes.Structure):
    """Decoder of decoder.h, made by `native_decoder`."""

    _fields_ = [
        *((name, Number) for name in (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "experts", "chosen",
            "shared_ffn", "window",
        )),
        ("normalized", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("layer", ctypes.POINTER(Layer)),
        ("norm", Pointer),
    ]  # fmt: skip


class NativeKvCache(ctypes.Structure):
    """KvCache of decoder.h."""

    _fields_ = [
        *((name, Pointer) for name in ("keys", "values")),
        *((name, Number) for name in ("slots", "positions")),
    ]


STRUCTS = {
    "Matrix": Matrix,
    "Table": Table,
    "Layer": Layer,
    "Decoder": NativeDecoder,
    "KvCache": NativeKvCache,
}
CONSTANTS = {
    "NO_MEMORY": NO_MEMORY,
    "NO_SUCH_ROW": NO_SUCH_ROW,
    "PANEL": PANEL,
    "FLOAT32": TYPES[torch.float32],
    "BFLOAT16": TYPES[torch.bfloat16],
    "INT8": TYPES[torch.int8],
}


def native_decoder(c: DecoderConfig, decoder: Decoder, weights: Weights) -> NativeDecoder:
    """Describe a decoder with its packed weights. Raises UnsuitedError for what C can't take."""
    layers = [_layer(c, layer, weights) for layer in decoder.layers]
    return NativeDecoder(
        layers=len(layers),
        hidden=c.hidden_size,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        ffn=c.ffn_width if c.moe is None else c.moe.expert_width,
        experts=c.moe.experts if c.moe else 0,
        chosen=c.moe.experts_per_token if c.moe else 0,
        shared_ffn=c.moe.shared_expert_width if c.moe else 0,
        normalized=bool(c.moe and c.moe.normalize_weights),
        norm_eps=c.norm_eps,
        layer=(Layer * len(layers))(*layers),
        norm=weights(decoder.norm.weight, c.hidden_size),
    )


def _layer(c: DecoderConfig, layer: Any, weights: Weights) -> Layer:
    """Describe a layer.

    layer: a DecoderLayer; the items of a ModuleList have no more precise type than Any.
    """
    attention, hidden, qk_heads = layer.attention, c.hidden_size, c.heads + c.kv_heads
    qkv_width = (qk_heads + c.kv_heads) * c.head_dim
    return Layer(
        attention_norm=weights(layer.attention_norm.weight, hidden),
        qkv=weights.matrix(attention.qkv, "weight", qkv_width, hidden),
        qk_norm=weights(attention.qk_norm.weight, qk_heads, c.head_dim),
        out=weights.matrix(attention.out, "weight", hidden, c.heads * c.head_dim),
        ffn_norm=weights(layer.ffn_norm.weight, hidden),
        **_feed_forward(c, layer.ffn, weights),
    )


def _feed_forward(
    c: DecoderConfig, ffn: FeedForward | MoeFeedForward, weights: Weights
) -> dict[str, Matrix]:
    """Return the matrices of a layer's feed-forward by their names in Layer."""
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
