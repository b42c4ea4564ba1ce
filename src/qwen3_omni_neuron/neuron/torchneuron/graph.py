"""A graph of neuron/graphs/ through torch.compile, with its state renewed in place.

At a graph's first call TorchNeuron compiles what Dynamo captures. A tensor that is renewed in place
is an input of the compiled graph, and aliased by an output, so nothing is copied back. Weights are
inputs, too, not compiled in, so the graphs of one part share them.
Source: aws-neuron/torch-neuronx v2.33.0, fx/passes/functionalize_copy_inplace_result.py.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import device_type, to_device_type

BACKEND = "neuron"  # TorchNeuron's name in torch.compile's table of backends
DEVICE_TYPES = (torch.int32, torch.float32, torch.bfloat16, torch.bool)


class Compilations:
    """Counts of the graphs that were compiled by this process.

    labels: labels of all compiled graphs, in order. late: labels of the graphs compiled after
    `settle`, each a bug, because a request waited for it.
    """

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.late: list[str] = []
        self._settled: set[str] = set()

    def settle(self, labels: Sequence[str]) -> None:
        """Declare that these graphs have been called, and are not to be compiled again."""
        self._settled |= set(labels)

    def add(self, label: str) -> None:
        """Count a compilation."""
        self.labels.append(label)
        if label in self._settled:
            self.late.append(label)


class CompiledGraph:
    """A graph over its part's module, compiled at its first call.

    It has input tensors of its own on the device, into which each call copies what it is given.
    """

    def __init__(
        self,
        graph: Graph,
        owner: nn.Module,
        device: torch.device,
        compilations: Compilations,
    ):
        kinds = {device_type(s.dtype) for s in (*graph.inputs, *graph.outputs, *graph.state)}
        assert kinds <= set(DEVICE_TYPES), f"{graph.label} has tensors of {kinds}"
        self.graph = graph
        self._inputs = {
            spec.name: torch.zeros(spec.lengths, dtype=device_type(spec.dtype), device=device)
            for spec in graph.inputs
        }
        self._zeros = set(self._inputs)  # names of the inputs that are zeros

        def backend(module: Any, inputs: list[Tensor], **options: Any) -> Any:
            compilations.add(graph.label)
            return lookup_backend(BACKEND)(module, inputs, **options)

        renewing = _Renewing(graph, owner)
        self._run = torch.compile(
            _with_own_code(lambda *tensors: renewing(*tensors)),  # noqa: PLW0108, for its code
            backend=backend,
            fullgraph=True,
            dynamic=False,
        )

    def __call__(
        self,
        given: Mapping[str, Tensor],
        state: Sequence[Tensor],
        entering: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, ...]:
        """Run the graph and renew the state.

        given: the inputs by name, in the device's types; one that is left out is zeros, and stays
        on the device until it is given. state: the tensors of Graph.state, on the
        device; each call may have other ones, all of them different tensors. entering: called when
        the inputs are on the device, before the graph runs. Returns the outputs on the host.
        """
        # Every call uses the same mode, because Dynamo compiles again for another one.
        with torch.inference_mode(False), torch.no_grad():
            for name, buffer in self._inputs.items():
                if name in given:
                    buffer.copy_(given[name])
                elif name not in self._zeros:
                    buffer.zero_()
            self._zeros = self._inputs.keys() - given.keys()
            entering()
            outputs = self._run(*self._inputs.values(), *state)
            return tuple(output.to("cpu", copy=True) for output in outputs)


class _Renewing(nn.Module):
    """Module of a graph, (*inputs, *state) -> outputs, that renews its state in place."""

    def __init__(self, graph: Graph, owner: nn.Module):
        super().__init__()
        self.traced = graph.module(owner)
        self._inputs, self._outputs = len(graph.inputs), len(graph.outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the graph once. Returns its outputs in the device's types."""
        results = self.traced(*tensors)
        for old, new in zip(tensors[self._inputs :], results[self._outputs :], strict=True):
            if new is not old:
                old.copy_(new)
        return tuple(map(to_device_type, results[: self._outputs]))


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with a code object of its own.

    Dynamo keeps at most a few compiled graphs for each code object. Graphs that shared one would be
    searched at every call, and soon refused.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
