"""The modules that NxD's ModelBuilder traces for a part, and the files with their weights.

ModelBuilder wants a forward with named parameters, the same for all graphs of a model. It takes a
registered buffer for state where forward replaces it by another tensor of its shape. It knows
weights, constants and state by their names in the module; states of one name in several graphs
share their memory on the device. Source: ModelBuilderV2 API reference, "In-place buffer updates".
"""

from collections.abc import Iterable, Iterator, Mapping
from inspect import Parameter, Signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import fill
from qwen3_omni_neuron.checkpoint.parameters import compare_names, converted
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, layout_bytes, write_tensor_files
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.graphs.parallel.cut import Cut, shard
from qwen3_omni_neuron.graphs.parallel.layers import Alone, Group
from qwen3_omni_neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.neuron.part import (
    WEIGHTS_FOLDER,
    PartSpec,
    device_type,
    rank_file,
    to_device_type,
)

_OWNER = "owner"


class TracedPart:
    """One rank's share of a part: its module with parallel layers, and a module for each graph."""

    def __init__(self, spec: PartSpec, group: Group):
        owner = spec.make().eval()
        self.cuts: Mapping[str, Cut] = parallelize(owner, spec.tp, group)
        """How each parameter is cut, by its name in the plain module."""
        fill(owner, [(name, to_device_type(buffer)) for name, buffer in owner.named_buffers()])
        self._owner = owner
        names = {tensor.name: None for graph in spec.graphs for tensor in graph.inputs}
        kind = _with_named_inputs(tuple(names))
        self.graphs = {graph.label: kind(graph, owner) for graph in spec.graphs}
        """The modules of the graphs by label, over the same weights."""

    @property
    def weights(self) -> Layout:
        """The shape and type of every tensor in a rank's file, by its name for the tracer.

        They are the parameters, and the constants, which the tracer may take for weights, too.
        """
        tensors = (*self._owner.named_parameters(), *self._owner.named_buffers())
        return {weight_name(name): (tuple(t.shape), t.dtype) for name, t in tensors}

    @property
    def constants(self) -> dict[str, Tensor]:
        """The owner's buffers, by their names in it."""
        return dict(self._owner.named_buffers())

    def allocate(self) -> None:
        """Give the parameters memory, uninitialized: a tracer reads their shapes only."""
        parameters = list(self._owner.named_parameters())
        fill(self._owner, ((name, torch.empty_like(t, device="cpu")) for name, t in parameters))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the tensors of a rank's file. weights: all those of the property `weights`."""
        owned = {name.removeprefix(f"{_OWNER}."): tensor for name, tensor in weights.items()}
        fill(self._owner, owned.items())


class TracedGraph(nn.Module):
    """One graph: named inputs to outputs, in the device's types, with the state in buffers.

    Its forward is that of the subclass that `_with_named_inputs` makes.
    """

    def __init__(self, graph: Graph, owner: nn.Module):
        super().__init__()
        self.owner = owner
        self._graph = graph
        for spec in graph.state:
            zeros = torch.zeros(spec.lengths, dtype=device_type(spec.dtype))
            self.register_buffer(state_name(spec), zeros, persistent=False)

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return inputs for one call, by name."""
        tensors = self._graph.example(seed)
        return {
            spec.name: to_device_type(tensor)
            for spec, tensor in zip(self._graph.inputs, tensors, strict=False)
        }

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the graph and renew the state. given: the graph's inputs, and maybe others."""
        graph = self._graph
        inputs = _typed(graph.inputs, (given[spec.name] for spec in graph.inputs))
        state = _typed(graph.state, (getattr(self, state_name(spec)) for spec in graph.state))
        outputs, new_state = graph.call(self.owner, inputs, state)
        for spec, old, tensor in zip(graph.state, state, new_state, strict=True):
            # The tracer would take a buffer that forward does not replace for a weight.
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


def weight_name(name: str) -> str:
    """Return the tracer's name of a parameter or constant of the part's own module."""
    return f"{_OWNER}.{name}"


def state_name(spec: TensorSpec) -> str:
    """Return the name of a state's buffer: state_keys_0 for "keys.0", for it may have no dots."""
    return "state_" + spec.name.replace(".", "_")


def _typed(specs: Iterable[TensorSpec], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Convert tensors of the device to the types that the module computes with."""
    return tuple(tensor.to(spec.dtype) for spec, tensor in zip(specs, tensors, strict=True))


def write_part_shards(spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the weights of every rank into a part's folder, which has none yet.

    Memory: one parameter, its stored tensors and the ranks' shares of it.
    Raises CheckpointError where the checkpoint lacks a tensor or has it in another shape, OSError.
    """
    stored = set(checkpoint.names)
    compare_names({p.name for _, pieces in spec.weights.pieces for p in pieces}, set(), stored)
    part = TracedPart(spec, Alone())
    (folder / WEIGHTS_FOLDER).mkdir()
    in_order = [*(name for name, _ in spec.weights.pieces), *part.constants]
    layout = {weight_name(name): part.weights[weight_name(name)] for name in in_order}

    def shards() -> Iterator[tuple[str, list[Tensor]]]:
        whole = converted(spec.weights, checkpoint, spec.dtype)
        for name, tensor in chain(whole, part.constants.items()):
            cut = part.cuts.get(name)
            yield weight_name(name), [shard(tensor, cut, rank) for rank in range(spec.tp)]

    write_tensor_files([folder / rank_file(rank) for rank in range(spec.tp)], layout, shards())


def read_part_shard(folder: Path, rank: int, wanted: Layout) -> dict[str, Tensor]:
    """Map a rank's weights into memory. wanted: TracedPart.weights.

    Raises ArtifactError where the file can't be read or has other tensors.
    """
    path = folder / rank_file(rank)
    again = f"Delete {folder} and compile again: only it will be."
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} can't be read ({error}). {again}") from error
    if different := sorted(tensors.keys() ^ wanted.keys()):
        raise ArtifactError(
            f"{path} does not have the tensors of this version's module ({len(different)} differ, "
            f"{different[0]} first). {again}"
        )
    for name, (shape, dtype) in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ArtifactError(
                f"{name} in {path} is {tensor.dtype} {list(tensor.shape)}, and {dtype} "
                f"{list(shape)} was expected. {again}"
            )
    return tensors


def part_shard_bytes(spec: PartSpec) -> int:
    """Return the size in bytes of all ranks' files, without headers."""
    return spec.tp * layout_bytes(TracedPart(spec, Alone()).weights)
