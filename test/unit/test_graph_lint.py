"""No graph has what its compiler makes slow: limits on scatters, gathers, operations and inputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.trn2.cost import Cost, CountingGroup, Gather, Scatter, graph_cost
from bench.trn2.counts import count_graphs
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.graphs.parts import vision_graph
from qwen3_omni_neuron.neuron.target import LIMITS
from testing.graph_cases import TINY_PLAN
from testing.graph_lint import (
    DESCRIPTORS,
    INPUTS,
    INSTRUCTIONS,
    NUMBERS,
    ROWS,
    TARGET_BYTES,
    faults,
)
from testing.released import RELEASED

PLAN = replace(
    TINY_PLAN,
    tp=Degrees.same(8),
    dtype="bfloat16",
    max_concurrency=32,
    context_length=8192,
    talker_context_length=8192,
    prompt_buckets=(512, 1024),
    decode_buckets=(512, 2048, 8192),
    patch_buckets=(256, 4096),
    audio_windows=(1, 4),
    projection_rows=(512,),
    batches=(1, 4, 32),
    chunk_frames=(1, 25),
)


def test_no_graph_has_what_its_compiler_makes_slow() -> None:
    """Every graph of full batches at the released sizes, of the whole depth."""
    graphs = count_graphs(RELEASED, PLAN, (PLAN.tp,))
    assert {one.graph.label: found for one in graphs if (found := faults(one.cost))} == {}
    assert len(graphs) > 40


@pytest.mark.parametrize("instance", ["trn2.48xlarge", "trn2.3xlarge"])
def test_a_core_can_load_every_default_graph(instance) -> None:
    plan = make_plan(Path(), RELEASED, LIMITS, instance)
    graphs = count_graphs(RELEASED, plan, (plan.tp,))
    assert {one.graph.label: found for one in graphs if (found := faults(one.cost))} == {}
    assert sum(one.cost.descriptors for one in graphs) <= DESCRIPTORS


def test_a_picture_of_16384_patches_has_too_many_instructions() -> None:
    graph = vision_graph(RELEASED.thinker.vision, 16384, torch.bfloat16)
    encoder = static_models(RELEASED).vision_encoder
    parallelize(encoder, 8, CountingGroup(8))
    assert faults(graph_cost(graph, encoder)) == ["instructions: 3603218, at most 2500000"]


NUMBER, ROW = torch.bfloat16, torch.int64
EMPTY = Cost(0, 0, 0)


def test_each_limit_is_held() -> None:
    for most, more, fault in (
        (
            replace(EMPTY, scatters=(Scatter(NUMBERS // 2, NUMBER, 0),) * 2),
            replace(EMPTY, scatters=(Scatter(NUMBERS // 2 + 1, NUMBER, 0),) * 2),
            "scatters: 50002 numbers of activations or state, at most 50000",
        ),
        (
            replace(EMPTY, scatters=(Scatter(ROWS, ROW, 0),) * 9),
            replace(EMPTY, scatters=(Scatter(ROWS + 1, ROW, 0),)),
            "scatter: 16385 row numbers, at most 16384",
        ),
        (
            replace(EMPTY, scatters=(Scatter(1, NUMBER, TARGET_BYTES),)),
            replace(EMPTY, scatters=(Scatter(1, ROW, TARGET_BYTES + 1),)),
            "scatter into 4194305 bytes, at most 4194304",
        ),
        (
            replace(EMPTY, gathers=(Gather(30, 30),)),
            replace(EMPTY, gathers=(Gather(31, 30),)),
            "gather: 31 bytes are moved, all matrices are 30",
        ),
        (
            replace(EMPTY, inputs=INPUTS),
            replace(EMPTY, inputs=INPUTS + 1),
            "inputs: 65, at most 64",
        ),
        (
            replace(EMPTY, instructions=INSTRUCTIONS),
            replace(EMPTY, instructions=INSTRUCTIONS + 1),
            "instructions: 2500001, at most 2500000",
        ),
        (EMPTY, replace(EMPTY, refused=("as_strided: a gather",)), "as_strided: a gather"),
    ):
        assert faults(most) == []
        assert faults(more) == [fault]
