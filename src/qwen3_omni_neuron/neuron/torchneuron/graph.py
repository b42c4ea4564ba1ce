"""A graph of neuron/graphs/ compiled by TorchNeuron, with its state updated in place.

A first call captures the graph for TorchNeuron's backend of torch.compile; Dynamo would take as
long again and check every weight at each call. State is an input that an output aliases. Source:
aws-neuron/torch-neuronx v2.33.0, fx/passes/functionalize_copy_inplace_result.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from qwen3_omni_neuron.neuron.graphs.graph import Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.neuron.graphs.layers import Alone, Group
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import PartSpec, device_type, to_device_type
from qwen3_omni_neuron.neuron.shards import PartShare, read_part_shard

BACKEND = "neuron"  # TorchNeuron's name in torch.compile's table of backends
DEVICE_TYPES = (torch.int32, torch.float32, torch.bfloat16, torch.bool)
Following = tuple["CompiledGraph", State]


class CompiledGraph:
    """A graph over its part's module, compiled at its first call."""

    def __init__(self, graph: Graph, owner: nn.Module, weights: Weights, device: torch.device):
        """owner: module whose parameters and buffers `weights` replaces."""
        specs = (*graph.inputs, *graph.outputs, *graph.state)
        # Graphs of one kind are one NEFF, as the two projections: weights are inputs.
        shapes = *(spec.shape for spec in specs), *(tensor.shape for tensor in weights.tensors)
        self.kind = type(owner), shapes
        kinds = {device_type(spec.dtype) for spec in specs}
        assert kinds <= set(DEVICE_TYPES), f"{graph.label} has tensors of {kinds}"
        self._given, self._outputs = Buffers(graph.inputs), Buffers(graph.outputs)
        self._inputs = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._given.kinds.items()
        }
        self._zeros = set[str]()  # names of inputs that are zeros
        self._renewing = _Renewing(graph, owner, weights)
        self._weights = weights.tensors
        self._compiled: Callable[..., Sequence[Tensor]] | None = None

    def __call__(self, given: Mapping[str, Tensor], state: State, *then: Following) -> Outputs:
        """Run the graph and update the state. Returns the outputs on the host.

        given: inputs by name, in the device's types; missing ones are zeros. then: graphs whose
        inputs the outputs become, without a copy or a wait, and their states.
        """
        given = self._given.join(given)
        # The mode that the graph was captured in.
        with torch.inference_mode(False), torch.no_grad():
            for name, buffer in self._inputs.items():
                if name in given:
                    buffer.copy_(given[name])
                elif name not in self._zeros:
                    copy_zeros(buffer)
            self._zeros = self._inputs.keys() - given.keys()
            buffers: Sequence[Tensor] = tuple(self._inputs.values())
            for graph, own in ((self, state), *then):
                tensors = (*buffers, *own, *graph._weights)
                if graph._compiled is None:
                    graph._compiled = compile_module(graph._renewing, tensors)
                buffers = graph._compiled(*tensors)
            copies = [buffer.to("cpu", copy=True) for buffer in buffers]
            return tuple(graph._outputs.split(copies).values())


PACKED = "packed"


class Buffers:
    """The buffers in which inputs or outputs are copied: one for all that TensorSpec.is_packed.

    kinds: shape and type of each, by its name.
    """

    def __init__(self, specs: Sequence[TensorSpec]):
        self._specs = specs
        self.kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if length := sum(math.prod(spec.shape) for spec in specs if spec.is_packed):
            self.kinds[PACKED] = (length,), torch.float32
        for spec in specs:
            if not spec.is_packed:
                self.kinds[spec.name] = spec.shape, device_type(spec.dtype)

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers of tensors, in the device's types."""
        packed = [tensors[spec.name].flatten().float() for spec in self._specs if spec.is_packed]
        whole = {PACKED: torch.cat(packed)} if packed else {}
        return whole | {name: tensors[name] for name in self.kinds if name in tensors}

    def split(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all buffers, in the order of the specs."""
        named, tensors, begin = dict(zip(self.kinds, buffers, strict=True)), dict[str, Tensor](), 0
        for spec in self._specs:
            if not spec.is_packed:
                tensors[spec.name] = named[spec.name]
                continue
            end = begin + math.prod(spec.shape)
            piece, begin = named[PACKED][begin:end].view(spec.shape), end
            tensors[spec.name] = piece.to(device_type(spec.dtype))
        return tensors


def copy_zeros(tensor: Tensor) -> None:
    """Copy zeros from the host by row: TorchNeuron would compile a fill on the device."""
    zeros = torch.zeros(tensor.shape[1:], dtype=tensor.dtype)
    for row in tensor:
        row.copy_(zeros)


class _Renewing(nn.Module):
    """Module of a graph, (*inputs, *state, *weights) -> outputs; updates state in place."""

    def __init__(self, graph: Graph, owner: nn.Module, weights: Weights):
        super().__init__()
        self.traced = graph.module(owner)
        self._inputs, self._outputs = Buffers(graph.inputs), Buffers(graph.outputs)
        self._names = [spec.name for spec in graph.outputs]
        self._state = len(graph.state)
        self._views = weights.views

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return outputs in the device's types."""
        inputs = len(self._inputs.kinds)
        given, rest = self._inputs.split(tensors[:inputs]), tensors[inputs:]
        state, weights = rest[: self._state], rest[self._state :]
        own = {f"owner.{name}": view for name, view in self._views(weights).items()}
        results = functional_call(self.traced, own, (*given.values(), *state))
        for old, new in zip(state, results[len(self._names) :], strict=True):
            if new is not old:
                old.copy_(new)
        outputs = map(to_device_type, results[: len(self._names)])
        return tuple(self._outputs.join(dict(zip(self._names, outputs, strict=True))).values())


def compile_module(module: nn.Module, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a module at the shapes of its inputs. Returns a function of these."""
    fake = FakeTensorMode()
    with fake:
        inputs = [fake.from_tensor(x, static_shapes=True) for x in tensors]
        # TorchNeuron's decompositions come first: their results have other strides.
        captured = make_fx(module, pre_dispatch=True)(*inputs)
    captured.graph.eliminate_dead_code()  # unused views of weights
    used = []
    for index, node in enumerate(captured.graph.find_nodes(op="placeholder")):
        if node.users:
            used.append(index)
        else:
            captured.graph.erase_node(node)
    captured.recompile()
    with tracing(TracingContext(fake)):
        compiled = lookup_backend(BACKEND)(captured, [tensors[index] for index in used])
    return lambda *tensors: compiled(*[tensors[index] for index in used])


# torch 2.13 renamed it to all_gather_single, and warns of the old name.
_all_gather = (
    collectives.all_gather_single
    if hasattr(collectives, "all_gather_single")
    else collectives.all_gather_tensor
)


class Collectives:
    """All ranks as a neuron.graphs.layers.Group, by torch's functional collectives.

    torch.distributed's default group must have that number.
    """

    def __init__(self, ranks: int):
        self._ranks = list(range(ranks))

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors; see Group.sum."""
        return collectives.all_reduce(x, "sum", self._ranks)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last axis."""
        # Along axis 0, which moves no data. Along another one torch would split the result, which
        # the device turns into a gather of single numbers.
        ranks = _all_gather(x, 0, self._ranks).unflatten(0, (-1, len(x)))
        return ranks.movedim(0, -2).flatten(-2)  # [ranks, ..., n] -> [..., ranks * n]


def group_of(ranks: int) -> Group:
    """Return the group of a part's ranks."""
    return Alone() if ranks == 1 else Collectives(ranks)


class PartGraphs:
    """One part's compiled graphs at one rank."""

    def __init__(
        self, spec: PartSpec, device: torch.device, folder: Path | None = None, rank: int = 0
    ):
        """Put weights and state on the device, without a compile.

        folder: the part's weights; None: leave all uninitialised. Raises ArtifactError for a file
        that does not fit the spec.
        """
        share = PartShare(spec, group_of(spec.tp))
        if folder is not None:
            share.load(read_part_shard(folder, rank, share.weights))
        weights, owner = Weights(share.owner, device), share.owner.to("meta")
        self._state = [
            torch.empty(tensor.shape, dtype=device_type(tensor.dtype), device=device)
            for tensor in spec.state
        ]
        if folder is not None:
            for tensor in self._state:
                copy_zeros(tensor)
        self._taken = {graph.label: len(graph.state) for graph in spec.graphs}
        self._graphs = {
            graph.label: CompiledGraph(graph, owner, weights, device) for graph in spec.graphs
        }

    def graph(self, label: str) -> Following:
        """Return a graph, and its part of the state."""
        return self._graphs[label], tuple(self._state[: self._taken[label]])

    def run(self, label: str, inputs: Mapping[str, Tensor], *then: Following) -> Outputs:
        """Run one graph, as neuron.part.Run does; then: see CompiledGraph."""
        graph, state = self.graph(label)
        return graph(inputs, state, *then)
