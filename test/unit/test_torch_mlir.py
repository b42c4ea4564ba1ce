"""Every graph of target torchneuron in torch-mlir: imported, and lowered to what backends take."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import distributed, fx

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.neuron.graphs.all import PARTS
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import PartSpec, part_spec, to_device_type
from qwen3_omni_neuron.neuron.torchneuron.graph import PartGraphs
from qwen3_omni_neuron.neuron.torchneuron.runtime import make_fake_group
from testing.graph_cases import TINY_PLAN
from testing.torchneuron import backend
from testing.torchneuron.backend import standing_in
from testing.torchneuron.torch_mlir import collectives_of, imported

IN_INT8 = {
    f"thinker with experts in int8, {arithmetic}": replace(
        TINY_PLAN, dtype="int8", mixed_arithmetic=arithmetic
    )
    for arithmetic in ("float32", "bfloat16")
}
MIXED = "code_predictor in float32 over bfloat16 weights"
PLANS = {**IN_INT8, MIXED: replace(TINY_PLAN, dtype="bfloat16", predictor_dtype="mixed")}

pytest.importorskip("iree.compiler", reason="torch-mlir is not installed: nothing was imported")


@pytest.fixture(scope="module")
def modules() -> Iterator[list[tuple[Counter[str], str]]]:
    """The graphs that are compiled: their collectives, and their MLIR modules."""
    made: list[tuple[Counter[str], str]] = []

    def check(module: fx.GraphModule) -> None:
        made.append((collectives_of(module), str(imported(module))))

    with standing_in():
        backend.FURTHER.append(check)
        yield made
        backend.FURTHER.remove(check)


def run_once(spec: PartSpec, graphs: Sequence[Graph]) -> None:
    part = PartGraphs(spec, torch.device("cpu"))
    for graph in graphs:
        part.run(graph.label, {s.name: to_device_type(s.idle_input()) for s in graph.inputs})


@pytest.mark.parametrize("case", [*PARTS, *PLANS])
def test_every_graph_is_imported_and_lowered(modules, case, config) -> None:
    plan, before = PLANS.get(case, TINY_PLAN), len(modules)
    spec = part_spec(config, plan, case.partition(" ")[0])
    run_once(spec, spec.graphs)
    assert len(modules) - before == len(spec.graphs)
    assert not [text for _, text in modules[before:] if ",f64>" in text or "torch.operator" in text]
    experts = [text.count(",si8>, !torch.int") for _, text in modules[before:]]
    assert any(experts) == (case in IN_INT8)
    if case == MIXED:
        for _, text in modules[before:]:
            products = re.findall(r"torch\.aten\.(?:mm|bmm|matmul|linear) .*", text)
            assert products and not [line for line in products if "bf16" in line]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """A group of two ranks, of which the first is here."""
    make_fake_group(2)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("part", PARTS)
def test_collectives_of_two_ranks_are_carried_with_fixed_shapes(
    modules, two_ranks, part, config
) -> None:
    """At one size of each graph."""
    spec, before = part_spec(config, replace(TINY_PLAN, tp=Degrees.same(2)), part), len(modules)
    run_once(spec, list({graph.name: graph for graph in spec.graphs}.values()))
    carried = re.compile(
        r'torch\.operator "([\w.]+)"\(.*-> !torch\.vtensor<\[[\d,]+\],(?:f32|si32)>'
    )
    for collectives, text in modules[before:]:
        assert Counter(carried.findall(text)) == collectives
        assert text.count("torch.operator") == collectives.total()
    counts = [collectives.total() for collectives, _ in modules[before:]]
    if part not in ("thinker", "talker"):
        assert min(counts) > 0
    else:  # but for the copy of a slot, where each rank copies its own heads
        assert counts.count(0) == 1
