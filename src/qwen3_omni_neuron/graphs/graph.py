"""One graph: a call of a module at fixed shapes, with its state passed in and out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Outputs = tuple[Tensor, ...]
State = tuple[Tensor, ...]
Axis = int | str
"""A length, or the name of one that may be any, which no compiler takes."""
Call = Callable[[nn.Module, tuple[Tensor, ...], State], tuple[Outputs, State]]
"""(module, inputs, state) -> (outputs, new state), the new state of the old one's shapes."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a graph. below: values of an example are under it (0: any; see `example`). idle:
    the value, everywhere, of a call that is to change nothing (see `quiet`)."""

    name: str
    shape: tuple[Axis, ...]
    dtype: torch.dtype
    below: Axis = 0
    idle: float = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.lengths) * self.dtype.itemsize

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape, all of it fixed. Raises ValueError where it is not."""
        return tuple(map(_length, self.shape))

    def example(self, generator: torch.Generator | None, device: str = "cpu") -> Tensor:
        """Integers from 0 up to `below`, bools of which the first of a row is true, floats in
        [0, below), or normal ones where it is 0."""
        if device == "meta":
            return torch.empty(self.lengths, dtype=self.dtype, device=device)
        if self.dtype == torch.bool:
            flags = torch.rand(self.lengths, generator=generator) > 0.3
            flags[..., 0] = True
            return flags
        if not self.dtype.is_floating_point:
            below = _length(self.below)
            return torch.randint(0, below, self.lengths, generator=generator).to(self.dtype)
        values = torch.randn(self.lengths, generator=generator)
        if self.below:
            values = torch.rand(self.lengths, generator=generator) * _length(self.below)
        return values.to(self.dtype)

    def quiet(self) -> Tensor:
        """An input for a call whose results nobody reads: `idle` everywhere."""
        return torch.full(self.lengths, self.idle, dtype=self.dtype)


@dataclass(frozen=True)
class Graph:
    """What a compiler needs to know of a graph.

    name: of its kind, "thinker_decode". bucket: the sizes it is for, and which are any. part: the
    attribute of loading.Models that it calls. state: what goes in after the inputs and comes out,
    renewed, after the outputs.
    """

    name: str
    bucket: Mapping[str, Axis]
    part: str
    call: Call
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...] = ()

    @property
    def label(self) -> str:
        """thinker_decode[slots=1,window=4096]"""
        return f"{self.name}[{','.join(f'{name}={size}' for name, size in self.bucket.items())}]"

    def size(self, axis: str) -> int:
        """Of the bucket, along an axis. Raises ValueError where it may be any."""
        return _length(self.bucket[axis])

    @property
    def aliases(self) -> dict[int, int]:
        """Which input each output of the traced module renews in place: its state."""
        first_in, first_out = len(self.inputs), len(self.outputs)
        return {first_out + i: first_in + i for i in range(len(self.state))}

    @property
    def state_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.state)

    def module(self, owner: nn.Module) -> "GraphModule":
        """The graph over its part, `owner`, as a module whose forward takes and gives tensors."""
        return GraphModule(owner, self)

    def example(self, seed: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
        """Inputs, then state, for one call. device: "cpu" or "meta"."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(spec.example(generator, device) for spec in (*self.inputs, *self.state))


class GraphModule(nn.Module):
    """A graph as a compiler takes it: (*inputs, *state) -> (*outputs, *new state)."""

    def __init__(self, owner: nn.Module, graph: Graph):
        super().__init__()
        self.owner = owner
        self._graph = graph

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = len(self._graph.inputs)
        outputs, state = self._graph.call(self.owner, tensors[:inputs], tensors[inputs:])
        return (*outputs, *state)


def _length(axis: Axis) -> int:
    if isinstance(axis, str):
        raise ValueError(f"{axis} may be of any length here. Give it one in the plan.")
    return axis
