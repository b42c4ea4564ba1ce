"""Encoder layers, and linear layers of the talker's projections, in C."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    Fields,
    Library,
    Weights,
    address_of,
    check,
    empty_floats,
    pointer_to,
)
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.rotary import Rotation
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, VisionLayer


class NativeEncoderLayer(nn.Module):
    """AudioEncoderLayer or VisionLayer in float32 over packed weights; see cpu.packing.

    A frame's (audio window's) result does not depend on other frames or the number of threads.
    Raises UnsuitedError.
    """

    def __init__(self, layer: Any, library: Library, threads: int):
        super().__init__()
        self._weights, self._run = Weights(), library.encoder_layer
        self._hidden, self._heads = layer.out.in_features, layer.heads
        fields = {
            "hidden": self._hidden,
            "heads": self._heads,
            "head_dim": self._hidden // self._heads,
            "norm_eps": layer.attention_norm.eps,
            "tanh_gelu": isinstance(layer, VisionLayer),
            "attention_norm": self._weights(layer.attention_norm.weight, self._hidden),
            "attention_bias": self._weights(layer.attention_norm.bias, self._hidden),
            "ffn_norm": self._weights(layer.ffn_norm.weight, self._hidden),
            "ffn_bias": self._weights(layer.ffn_norm.bias, self._hidden),
            "qkv": self._matrix(layer.qkv),
            "out": self._matrix(layer.out),
            "fc1": self._matrix(layer.fc1),
            "fc2": self._matrix(layer.fc2),
            "threads": threads,
        }
        self._described = ffi.new("EncoderLayer *", fields)

    def forward(self, x: Tensor, *others: Tensor | Rotation) -> Tensor:
        """Apply the layer to x, float32 [frames, rows, hidden].

        others: the layer's other arguments; last a mask, true for each frame's first rows.
        """
        *rotations, mask = others
        frames, rows, _ = x.shape
        assert isinstance(mask, Tensor)
        seen = mask.expand(frames, 1, 1, rows).sum(3).flatten()
        y, tables = x.contiguous().clone(), self._rotation(rotations)
        status = self._run(
            self._described,
            frames,
            rows,
            address_of(seen),
            *((ffi.NULL, ffi.NULL) if tables is None else map(address_of, tables)),
            pointer_to(y, torch.float32, frames, rows, self._hidden),
        )
        check(status)
        return y

    def _rotation(self, rotations: Sequence[Tensor | Rotation]) -> Rotation | None:
        """Return each row's cosine and sine, [rows, head_dim / 2], if the layer has them."""
        if not rotations:
            return None
        cos, sin = rotations[0]
        half = self._hidden // self._heads // 2
        # The first half of `sin` has the rotation's sign.
        return cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    def _matrix(self, linear: nn.Linear) -> Fields:
        shape = linear.out_features, linear.in_features
        return self._weights.matrix(linear, "weight", *shape, bias=linear.bias)


def use_native_layers(
    encoder: AudioEncoder | VisionEncoder, library: Library, threads: int
) -> None:
    """Replace an encoder's layers, whose weights must be packed."""
    layers = [NativeEncoderLayer(layer, library, threads) for layer in encoder.layers]
    encoder.layers = nn.ModuleList(layers)


class NativeLinear(nn.Module):
    """nn.Linear in float32 over a packed weight; see cpu.packing.

    A row's result does not depend on other rows or the number of threads.
    """

    def __init__(self, linear: nn.Linear, library: Library, threads: int):
        super().__init__()
        self._into, self._out = linear.in_features, linear.out_features
        self._weights, self._threads = Weights(), threads
        self._run = library.multiply_rows
        bias = None if linear.bias is None else linear.bias.detach()
        matrix = self._weights.matrix(linear, "weight", self._out, self._into, bias=bias)
        self._matrix = ffi.new("Matrix *", matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Map x, float32 [..., into], to [..., out]."""
        rows = x.reshape(-1, self._into).contiguous()
        y = empty_floats(len(rows), self._out)
        status = self._run(
            self._matrix,
            len(rows),
            pointer_to(rows, torch.float32, len(rows), self._into),
            self._into,
            address_of(y),
            self._threads,
        )
        check(status)
        return y.view(*x.shape[:-1], self._out)


def use_native_linears(module: nn.Module, library: Library, threads: int) -> None:
    """Replace a module's linear layers, whose weights must be packed."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, NativeLinear(child, library, threads))
