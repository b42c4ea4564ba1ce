"""The modules that NxD's ModelBuilder traces for a part.

ModelBuilder wants a forward with named parameters, the same for all graphs of a model. It takes a
registered buffer for state where forward replaces it by another tensor of its shape. It knows
weights, constants and state by their names in the module; states of one name in several graphs
share their memory on the device. Source: ModelBuilderV2 API reference, "In-place buffer updates".
"""

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.graphs.parallel.layers import Group
from qwen3_omni_neuron.neuron.part import PartSpec, device_type, to_device_type
from qwen3_omni_neuron.neuron.shards import PartShare


class TracedPart(PartShare):
    """One rank's share of a part, and a module for each of its graphs."""

    def __init__(self, spec: PartSpec, group: Group):
        super().__init__(spec, group)
        names = {tensor.name: None for graph in spec.graphs for tensor in graph.inputs}
        kind = _with_named_inputs(tuple(names))
        self.graphs = {graph.label: kind(graph, self.owner) for graph in spec.graphs}
        """Each graph's module by label; all share the same weights."""


class TracedGraph(nn.Module):
    """One graph: named inputs to outputs, in the device's types, with the state in buffers.

    Its forward is defined by the subclass that `_with_named_inputs` makes.
    """

    def __init__(self, graph: Graph, owner: nn.Module):
        super().__init__()
        self.owner = owner
        self._graph = graph
        for spec in graph.state:
            zeros = torch.zeros(spec.shape, dtype=device_type(spec.dtype))
            self.register_buffer(state_name(spec), zeros, persistent=False)

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return inputs for one call, by name."""
        tensors = self._graph.example(seed)
        return {
            spec.name: to_device_type(tensor)
            for spec, tensor in zip(self._graph.inputs, tensors, strict=False)
        }

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the graph and renew the state. given: the graph's inputs, and possibly others."""
        graph = self._graph
        inputs = _typed(graph.inputs, (given[spec.name] for spec in graph.inputs))
        state = _typed(graph.state, (getattr(self, state_name(spec)) for spec in graph.state))
        outputs, new_state = graph.call(self.owner, inputs, state)
        for spec, old, tensor in zip(graph.state, state, new_state, strict=True):
            # The tracer treats a buffer that forward does not replace as a weight.
            assert tensor is not old, f"{graph.label} does not renew {spec.name}"
            setattr(self, state_name(spec), to_device_type(tensor))
        return tuple(map(to_device_type, outputs))


def _with_named_inputs(names: tuple[str, ...]) -> type[TracedGraph]:
    """Make a TracedGraph whose forward has these parameters, each None by default.

    All graphs of a part have the same forward; a graph's inputs are some of its parameters.
    """
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name in names:
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None))
    signature = Signature(parameters)

    def forward(*args: Any, **kwargs: Tensor) -> tuple[Tensor, ...]:
        given = signature.bind(*args, **kwargs).arguments
        module: TracedGraph = given.pop("self")
        return module.run(given)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type("NamedTracedGraph", (TracedGraph,), {"forward": forward})


def state_name(spec: TensorSpec) -> str:
    """Return the name of a state's buffer, which can't have dots."""
    return "state_" + spec.name.replace(".", "_")


def _typed(specs: Iterable[TensorSpec], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Convert tensors of the device to the types that the module computes with."""
    return tuple(tensor.to(spec.dtype) for spec, tensor in zip(specs, tensors, strict=True))
