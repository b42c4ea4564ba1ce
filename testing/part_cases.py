"""The parts that are traced from model/, their graphs at tiny sizes, and calls to compare."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART, CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DECODERS
from qwen3_omni_neuron.neuron.part import PartSpec, part_spec
from testing.graph_cases import TINY_PLAN

PLAIN_PARTS = tuple(part for part in MODEL_OF_PART if part not in DECODERS)
PLAN = replace(TINY_PLAN, projection_rows=(8, 16))
IDLE = PLAN.max_concurrency
Call = tuple[str, tuple[Tensor, ...]]


def plain_spec(
    config: OmniConfig, name: str, tp: int, dtype: torch.dtype = torch.float64
) -> PartSpec:
    return part_spec(config, plan_of(tp, dtype), name)


def plain_graphs(config: OmniConfig, name: str, tp: int, dtype: torch.dtype) -> list[Graph]:
    return [g for g in all_graphs(config, plan_of(tp, dtype)) if g.part == name]


def plan_of(tp: int, dtype: torch.dtype) -> CompilePlan:
    return replace(PLAN, tp=Degrees.same(tp), dtype=str(dtype).removeprefix("torch."))


def calls_of(graphs: Mapping[str, Graph]) -> Iterator[Call]:
    """Yield a call of every graph; graphs with a state are called after others have changed it."""
    if not any(graph.state for graph in graphs.values()):
        yield from ((label, graph.example(2)) for label, graph in graphs.items())
        return
    order = [
        ("code2wav[streams=3,frames=4]", [2, 0, IDLE], [0, 0, 0]),
        ("code2wav[streams=3,frames=1]", [0, 2, IDLE], [4, 4, 0]),
        ("code2wav[streams=1,frames=4]", [1], [0]),
        ("code2wav[streams=3,frames=4]", [1, 2, 0], [4, 5, 5]),
        ("code2wav[streams=3,frames=1]", [0, 1, 2], [0, 0, 9]),
        ("code2wav[streams=1,frames=4]", [0], [1]),
        ("code2wav[streams=1,frames=1]", [0], [5]),
        ("code2wav[streams=1,frames=1]", [2], [0]),
        ("code2wav[streams=3,frames=1]", [2, 1, 0], [1, 1, 6]),
    ]
    assert {label for label, _, _ in order} == graphs.keys()
    for seed, (label, slots, position) in enumerate(order):
        codes = graphs[label].example(seed)[0]
        yield label, (codes, torch.tensor(slots), torch.tensor(position))


class PlainPart:
    """Graphs over the plain module, with the state passed from call to call."""

    def __init__(self, graphs: Mapping[str, Graph], module: nn.Module):
        self._graphs, self._module = graphs, module
        kept = next((graph.state for graph in graphs.values() if graph.state), ())
        self._state = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in kept)

    @torch.no_grad()
    def call(self, label: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        graph = self._graphs[label]
        given = graph.module(self._module)(*inputs, *(self._state if graph.state else ()))
        if graph.state:
            self._state = given[len(graph.outputs) :]
        return given[: len(graph.outputs)]
