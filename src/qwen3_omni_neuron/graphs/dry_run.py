"""The plan of a compile without weights and without a compiler: sizes, cost and floors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.graphs.cost import Cost, CountingGroup, graph_cost
from qwen3_omni_neuron.graphs.graph import Graph
from qwen3_omni_neuron.graphs.hardware import TRN2, Chip
from qwen3_omni_neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.model.config import OmniConfig

TP_DEGREES = (4, 8)
SHARED = {"code_predictor": "code0_embedding."}  # the talker's table, counted there


@dataclass(frozen=True)
class PartSize:
    """A part's parameters, whole, and bytes of them on each core by TP degree."""

    name: str
    parameters: int
    nbytes: int
    shard_bytes: dict[int, int]


@dataclass(frozen=True)
class PlannedGraph:
    """A graph on one of `tp` cores. floor_s: from published figures, collectives left out."""

    graph: Graph
    tp: int
    cost: Cost
    floor_s: float


@dataclass(frozen=True)
class DryRun:
    """What `dry_run` finds. graphs: degree after degree, each in the order of graphs.all.

    state_bytes: on each core, by TP degree, of the KV caches and of the vocoder's state, a line a
    slot and its idle one: kept between calls, and shared by the graphs of a part.
    """

    parts: list[PartSize]
    graphs: list[PlannedGraph]
    state_bytes: dict[int, dict[str, int]]
    chip: Chip

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def dry_run(
    config: OmniConfig,
    plan: CompilePlan,
    degrees: Sequence[int],
    chip: Chip = TRN2,
) -> DryRun:
    """Lay every graph of a plan out on the meta device, as each TP degree has it, and count.

    Raises OptionError where a degree and the KV heads don't divide.
    """
    dtype = getattr(torch, plan.dtype)
    whole = static_models(config, dtype)
    shards: dict[int, dict[str, int]] = {}
    graphs: list[PlannedGraph] = []
    state: dict[int, dict[str, int]] = {}
    for tp in degrees:
        group, rank = CountingGroup(tp), static_models(config, dtype)
        for _, module in _parts(rank):
            parallelize(module, tp, group)
        shards[tp] = {name: _size(name, module)[1] for name, module in _parts(rank)}
        state[tp] = {}
        for graph in all_graphs(config, replace(plan, tp=tp)):
            cost = graph_cost(graph, getattr(rank, graph.part), group)
            floor = chip.floor_s(cost.flops, cost.weight_bytes + cost.state_bytes)
            graphs.append(PlannedGraph(graph, tp, cost, floor))
            if graph.state:
                state[tp][graph.part] = max(state[tp].get(graph.part, 0), graph.state_bytes)
    parts = [
        PartSize(name, *_size(name, module), {tp: shards[tp][name] for tp in degrees})
        for name, module in _parts(whole)
    ]
    return DryRun(parts, graphs, state, chip)


def dry_run_text(run: DryRun) -> str:
    """Two tables in Markdown: parts and their shards, graphs and their floors."""
    degrees = list(run.state_bytes)
    lines = [
        f"{run.parameters / 1e9:.1f} B parameters, {run.nbytes / 1e9:.1f} GB.",
        "",
        *_table(
            ["part", "parameters", "GB", *(f"GB a core, TP {tp}" for tp in degrees)],
            [
                [part.name, f"{part.parameters / 1e6:,.0f} M", f"{part.nbytes / 1e9:.2f}"]
                + [f"{part.shard_bytes[tp] / 1e9:.2f}" for tp in degrees]
                for part in run.parts
            ]
            + [
                [f"state of {part}", "", ""]
                + [f"{run.state_bytes[tp][part] / 1e9:.2f}" for tp in degrees]
                for part in run.state_bytes[degrees[0]]
            ]
            + [
                ["all", f"{run.parameters / 1e6:,.0f} M", f"{run.nbytes / 1e9:.2f}"]
                + [
                    f"{_core_bytes(run, tp) / 1e9:.2f} of "
                    f"{run.chip.memory_bytes / run.chip.cores / 1e9:.1f}"
                    for tp in degrees
                ]
            ],
        ),
        "",
        f"One call on one core of {run.chip.name}. The floor is an estimate: what is read over the "
        "published bandwidth or what is computed over the published peak, the longer of the two; "
        "sums over the cores are left out.",
        "",
        *_table(
            ["graph", "TP", "GFLOP", "MB weights", "MB state", "sums", "KB a sum", "floor ms"],
            [
                [
                    planned.graph.label,
                    str(planned.tp),
                    f"{planned.cost.flops / 1e9:.2f}",
                    f"{planned.cost.weight_bytes / 1e6:.1f}",
                    f"{planned.cost.state_bytes / 1e6:.1f}",
                    str(planned.cost.sums),
                    f"{planned.cost.sum_bytes / max(1, planned.cost.sums) / 1e3:.1f}",
                    f"{planned.floor_s * 1e3:.3f}",
                ]
                for planned in run.graphs
            ],
        ),
    ]
    return "\n".join(lines)


def _core_bytes(run: DryRun, tp: int) -> int:
    shards = sum(part.shard_bytes[tp] for part in run.parts)
    return shards + sum(run.state_bytes[tp].values())


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _parts(models: Models) -> Iterator[tuple[str, nn.Module]]:
    for name in PARTS:
        module = getattr(models, name)
        if module is not None:
            yield name, module


def _size(part: str, module: nn.Module) -> tuple[int, int]:
    """Parameters and their bytes."""
    shared = SHARED.get(part, "\0")
    own = [p for name, p in module.named_parameters() if not name.startswith(shared)]
    return sum(p.numel() for p in own), sum(p.nbytes for p in own)
