"""A part of the model that is compiled from model/."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.modules import cast, lay_out
from qwen3_omni_neuron.checkpoint.names import codec_embedding_pieces
from qwen3_omni_neuron.checkpoint.parameters import Part
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART, MODEL_STAGES, CompilePlan
from qwen3_omni_neuron.errors import ClosedError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, predictor_types, static_config
from qwen3_omni_neuron.neuron.graphs.graph import Graph, Outputs, TensorSpec

logger = logging.getLogger(__name__)

WEIGHTS_FOLDER = "weights"


def rank_file(rank: int) -> str:
    """Return the path of a core's weights, relative to the part's folder."""
    return f"{WEIGHTS_FOLDER}/tp{rank}_sharded_checkpoint.safetensors"


_DEVICE_TYPES = {torch.int64: torch.int32}


@dataclass(frozen=True)
class PartSpec:
    """Description of one part to compile or load.

    graphs: one core's; graphs with state share it, or its first tensors. dtype: type of weights
    except int8 experts and scales. make: creates a plain module on the meta device. weights: each
    parameter's stored tensors; int8 parameters include scales.
    """

    name: str
    graphs: tuple[Graph, ...]
    tp: int
    lnc: int
    dtype: torch.dtype
    make: Callable[[], nn.Module]
    weights: Part

    def __post_init__(self) -> None:
        labels = [graph.label for graph in self.graphs]
        assert labels, f"{self.name} has no graph"
        assert len(labels) == len(set(labels)), labels
        assert {graph.part for graph in self.graphs} == {self.name}, labels
        assert all(graph.state == self.state[: len(graph.state)] for graph in self.graphs), (
            f"graphs of {self.name} must share one state"
        )

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """Each core's state tensors."""
        return max((graph.state for graph in self.graphs), key=len)


def part_spec(config: OmniConfig, plan: CompilePlan, name: str) -> PartSpec:
    """Return the spec of a plan's part, by name."""
    dtype = getattr(torch, plan.arithmetic)
    if name == "code_predictor":
        dtype, _ = predictor_types(plan)
    static = static_config(config, plan.dtype == "int8")

    def make() -> nn.Module:
        return _laid_out(static, name, dtype)[0]

    graphs = tuple(graph for graph in all_graphs(config, plan) if graph.part == name)
    module, weights = _laid_out(static, name, dtype)
    if name == "code_predictor":  # with the talker's codec embedding, a copy on the same cores
        (_, pieces), *_ = codec_embedding_pieces()
        whole = [*weights.pieces, ("code0_embedding.weight", pieces)]
        weights = replace(weights, pieces=whole)
    parameters = dict(module.named_parameters())
    scales = {name + SCALE for name, p in parameters.items() if p.dtype == torch.int8}
    missing = parameters.keys() ^ (dict(weights.pieces).keys() | scales)
    assert not missing, f"{name}: parameters and pieces differ in {sorted(missing)}"
    return PartSpec(name, graphs, plan.degree(name), plan.lnc, dtype, make, weights)


def _laid_out(config: OmniConfig, name: str, dtype: torch.dtype) -> tuple[nn.Module, Part]:
    models, parts = lay_out(config, (MODEL_STAGES[MODEL_OF_PART[name]],))
    module: nn.Module = getattr(models, name)
    cast(module, dtype)
    return module, parts[name]


Run = Callable[..., Sequence[Tensor]]
"""(label, inputs by name, then if given) -> outputs, in the device's types; missing ones: zeros."""


class LoadedPart:
    """One part's graphs on its cores, with its weights and state."""

    def __init__(self, graphs: Iterable[Graph], run: Run):
        self.graphs: Mapping[str, Graph] = {graph.label: graph for graph in graphs}
        """Graphs by label."""
        self.name = next(iter(self.graphs.values())).part
        self._run: Run | None = run

    def call(self, label: str, *inputs: Tensor | None, then: Graph | None = None) -> Outputs:
        """Run one graph and update the state. Returns Graph.outputs, on the host.

        inputs: as Graph.inputs; None: zeros. then: another part's graph, whose inputs the outputs
        become on the device, and whose own are returned. Raises ClosedError.
        """
        if self._run is None:
            raise ClosedError(f"{self.name} was closed. Load it again.")
        graph, given = self.graphs[label], dict[str, Tensor]()
        for spec, tensor in zip(graph.inputs, inputs, strict=True):
            if tensor is None:
                assert spec.is_optional, f"{label} was called without {spec.name}"
                continue
            found = tuple(tensor.shape), tensor.dtype
            assert found == (spec.shape, spec.dtype), f"{label} was called with {spec.name} {found}"
            given[spec.name] = to_device_type(tensor)
        outputs = self._run(label, given, then) if then else self._run(label, given)
        specs = (then or graph).outputs
        return tuple(tensor.to(spec.dtype) for spec, tensor in zip(specs, outputs, strict=True))

    def warm_up(self) -> None:
        """Call every graph once. Changes only decoders' slots, which are filled before use."""
        started = time.monotonic()
        for label, graph in self.graphs.items():
            self.call(label, *[spec.idle_input() for spec in graph.inputs])
        log_warm_up(self.name, len(self.graphs), started)

    def close(self) -> None:
        """Free the part's memory, and refuse later calls."""
        self._run = None


def log_warm_up(name: str, graphs: int, started: float) -> None:
    """Log a part's warm-up since `started` (time.monotonic)."""
    seconds = time.monotonic() - started
    logger.info("%s: called each of %d graphs once, in %.1f s", name, graphs, seconds)


def graphs_by_size(part: LoadedPart, name: str, *axes: str) -> dict[tuple[int, ...], Graph]:
    """Return one name's graphs by their sizes along `axes`, ascending."""
    alike = [graph for graph in part.graphs.values() if graph.name == name]
    return dict(sorted((tuple(map(graph.size, axes)), graph) for graph in alike))


def device_type(dtype: torch.dtype) -> torch.dtype:
    """Return the device's dtype for this one: int32 for int64."""
    return _DEVICE_TYPES.get(dtype, dtype)


def to_device_type(x: Tensor) -> Tensor:
    """Convert a tensor to its dtype on the device."""
    return x.to(device_type(x.dtype))
