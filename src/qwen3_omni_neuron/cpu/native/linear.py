"""Linear layers of the encoders and of the talker's projections in C."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    Library,
    Weights,
    address_of,
    check,
    empty_floats,
    pointer_to,
)


class NativeLinear(nn.Module):
    """nn.Linear over a packed weight, in float32; see cpu.packing.

    A row's result depends neither on the other rows nor on the number of threads.
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
    """Replace a module's linear layers, whose weights are packed."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, NativeLinear(child, library, threads))
