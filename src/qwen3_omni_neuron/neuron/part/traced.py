"""The modules that a tracer takes for the graphs of one part.

NxD's ModelBuilder wants named parameters, the same for all graphs of a model; keeps a state that
is a registered buffer which forward replaces by another tensor of its shape; and knows weights,
constants and state by their names in the module. States of one name in several graphs are one
place on the device. Source: ModelBuilderV2 API reference, "In-place buffer updates".
"""

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.modules import fill
from qwen3_omni_neuron.checkpoint.tensor_file import Layout
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.graphs.parallel.cut import Cut
from qwen3_omni_neuron.graphs.parallel.layers import Group
from qwen3_omni_neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.neuron.part.device_types import device_type, to_device_type
from qwen3_omni_neuron.neuron.part.spec import PartSpec

_OWNER = "owner"


class TracedPart:
    """One rank's share of a part: the module with parallel layers in it, and a module a graph.

    cuts: how each parameter is cut, by its name in the plain module. graphs: by label, over the
    same owner.
    """

    def __init__(self, spec: PartSpec, group: Group):
        owner = spec.make().eval()
        self.cuts: Mapping[str, Cut] = parallelize(owner, spec.tp, group)
        fill(owner, [(name, to_device_type(buffer)) for name, buffer in owner.named_buffers()])
        self._owner = owner
        names = {tensor.name: None for graph in spec.graphs for tensor in graph.inputs}
        kind = _with_named_inputs(tuple(names))
        self.graphs = {graph.label: kind(graph, owner) for graph in spec.graphs}

    @property
    def weights(self) -> Layout:
        """What a rank's weight file holds, by the name that the tracer knows it by: parameters,
        and constants, which it may take for weights, too."""
        tensors = (*self._owner.named_parameters(), *self._owner.named_buffers())
        return {weight_name(name): (tuple(t.shape), t.dtype) for name, t in tensors}

    @property
    def constants(self) -> dict[str, Tensor]:
        """The owner's buffers, by their names in it."""
        return dict(self._owner.named_buffers())

    def allocate(self) -> None:
        """Give the parameters memory, which is never written to: what a tracer needs."""
        parameters = list(self._owner.named_parameters())
        fill(self._owner, ((name, torch.empty_like(t, device="cpu")) for name, t in parameters))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the tensors of a rank's weight file, all of `weights`."""
        owned = {name.removeprefix(f"{_OWNER}."): tensor for name, tensor in weights.items()}
        fill(self._owner, owned.items())


class TracedGraph(nn.Module):
    """One graph: its inputs by name in, its outputs out, its state in buffers of its own.

    inputs and outputs: in the types of the device. forward: of the class that
    `_with_named_inputs` makes.
    """

    def __init__(self, graph: Graph, owner: nn.Module):
        super().__init__()
        self.owner = owner
        self._graph = graph
        for spec in graph.state:
            zeros = torch.zeros(spec.lengths, dtype=device_type(spec.dtype))
            self.register_buffer(state_name(spec), zeros, persistent=False)

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Inputs for one call, by name."""
        tensors = self._graph.example(seed)
        return {
            spec.name: to_device_type(tensor)
            for spec, tensor in zip(self._graph.inputs, tensors, strict=False)
        }

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What forward does. given: at least the graph's inputs."""
        graph = self._graph
        inputs = _typed(graph.inputs, (given[spec.name] for spec in graph.inputs))
        held = _typed(graph.state, (getattr(self, state_name(spec)) for spec in graph.state))
        outputs, left = graph.call(self.owner, inputs, held)
        for spec, old, tensor in zip(graph.state, held, left, strict=True):
            # A buffer that forward leaves alone would be a weight to the tracer, in no file.
            assert tensor is not old, f"{graph.label} does not renew {spec.name}"
            setattr(self, state_name(spec), to_device_type(tensor))
        return tuple(map(to_device_type, outputs))


def _with_named_inputs(names: tuple[str, ...]) -> type[TracedGraph]:
    """TracedGraph with a forward of these parameters, each None by default: a graph has some of
    them, and all graphs of a part have the same forward."""
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


def weight_name(name: str) -> str:
    """The name by which a tracer knows a parameter or constant of the part's own module."""
    return f"{_OWNER}.{name}"


def state_name(spec: TensorSpec) -> str:
    """The name of a state's buffer: "keys.0" is state_keys_0, since buffers have no dots."""
    return "state_" + spec.name.replace(".", "_")


def _typed(specs: Iterable[TensorSpec], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """What was on the device, in the types that the module computes with."""
    return tuple(tensor.to(spec.dtype) for spec, tensor in zip(specs, tensors, strict=True))
