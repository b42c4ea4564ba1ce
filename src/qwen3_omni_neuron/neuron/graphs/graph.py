"""A graph: a function traced from a module at one bucket."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Outputs = tuple[Tensor, ...]
State = tuple[Tensor, ...]
Call = Callable[[nn.Module, tuple[Tensor, ...], State], tuple[Outputs, State]]
"""(module, inputs, state) -> (outputs, new state); both states have the same shapes."""


MOST_WIDENED = 2**18
"""Most numbers below 4 bytes that are copied as float32: more take longer than a copy."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a graph.

    below: exclusive upper bound of an example's values; 0: none. idle: fill value of an input whose
    call must not change any state. is_optional: zeros if omitted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int = 0
    idle: float = 0
    is_optional: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """True if torchneuron copies it in one float32 buffer with a call's others.

        float32 represents its numbers exactly: integers are below 2**24.
        """
        if self.is_optional or self.dtype == torch.float64:
            return False
        return self.dtype.itemsize >= 4 or math.prod(self.shape) <= MOST_WIDENED

    def example(self, generator: torch.Generator | None, device: str = "cpu") -> Tensor:
        """Return an example from [0, below), or normal floats; each row's first bool is True."""
        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.dtype == torch.bool:
            flags = torch.rand(self.shape, generator=generator) > 0.3
            flags[..., 0] = True
            return flags
        if not self.dtype.is_floating_point:
            return torch.randint(0, self.below, self.shape, generator=generator).to(self.dtype)
        values = torch.randn(self.shape, generator=generator)
        if self.below:
            values = torch.rand(self.shape, generator=generator) * self.below
        return values.to(self.dtype)

    def idle_input(self) -> Tensor:
        """Return the input of a call that must not change any state."""
        return torch.full(self.shape, self.idle, dtype=self.dtype)


def buffers(specs: Sequence[TensorSpec]) -> int:
    """Return the number of buffers for copies of tensors; see TensorSpec.is_packed."""
    packed = [spec.is_packed for spec in specs]
    return packed.count(False) + any(packed)


@dataclass(frozen=True)
class Graph:
    """Description of a graph for a compiler.

    name: the kind, "thinker_decode". bucket: its sizes by name. part: attribute of
    checkpoint.modules.Models. state: passed after the inputs, returned after the outputs.
    """

    name: str
    bucket: Mapping[str, int]
    part: str
    call: Call
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...] = ()

    @property
    def label(self) -> str:
        """Name and bucket, such as "thinker_decode[slots=1,window=4096]"."""
        sizes = ",".join(f"{name}={size}" for name, size in self.bucket.items())
        return f"{self.name}[{sizes}]" if sizes else self.name

    def size(self, axis: str) -> int:
        """Return the bucket's size along an axis."""
        return self.bucket[axis]

    @property
    def copies(self) -> int:
        """Number of buffers that a call copies from or to the host."""
        return buffers(self.inputs) + buffers(self.outputs)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the state."""
        return sum(spec.nbytes for spec in self.state)

    def module(self, owner: nn.Module) -> "GraphModule":
        """Return the graph over its part, `owner`, as a module."""
        return GraphModule(owner, self)

    def example(self, seed: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
        """Return the inputs and state of one call. device: "cpu" or "meta"."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(spec.example(generator, device) for spec in (*self.inputs, *self.state))


class GraphModule(nn.Module):
    """Module that a compiler traces: (*inputs, *state) -> (*outputs, *new state)."""

    def __init__(self, owner: nn.Module, graph: Graph):
        super().__init__()
        self.owner = owner
        self._graph = graph

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the graph once."""
        inputs = len(self._graph.inputs)
        outputs, state = self._graph.call(self.owner, tensors[:inputs], tensors[inputs:])
        return (*outputs, *state)
