"""Tensor parallelism: every graph over several ranks is the graph over one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.trn2.cost import CountingGroup, graph_cost
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, fill
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import Code2WavConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.cut import (
    PAD,
    cut_heads,
    key_heads,
    local_kv_heads,
    query_heads,
    shard,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.layers import Alone, Group
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.graphs.parts import vocoder_state
from testing.graph_cases import TINY_PLAN, with_weights
from testing.int8_experts import int8_models
from testing.models import load_models
from testing.parallel import shard_state
from testing.rank_threads import Ranks
from testing.repeats import again
from testing.torchneuron.leaner import write_leaner_checkpoint

CLOSE = {"atol": 1e-9, "rtol": 1e-9}  # float64: sums in another order
# 2 ranks have heads of their own, 8 are more than the heads.
TP = (again(1), 2, again(4), 8)
INT8 = "thinker in int8"
# One graph of each kind; decode of one and of several rows takes experts differently.
PLAN = replace(
    TINY_PLAN,
    dtype="float64",
    audio_windows=(2,),
    patch_buckets=(16,),
    decode_buckets=(64,),
    chunk_frames=(4,),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def config(checkpoint) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="module")
def double(checkpoint, config) -> Models:
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    return with_weights(static_models(config, torch.float64), weights)


@pytest.fixture(scope="module")
def int8(checkpoint, config) -> Models:
    """float64 but for the thinker's experts."""
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    return int8_models(config, weights, torch.float64)


@pytest.fixture(scope="module")
def graphs(config) -> list[Graph]:
    return list(all_graphs(config, PLAN))


def rank_module(
    config: OmniConfig, plain: nn.Module, part: str, tp: int, rank: int, group: Group
) -> nn.Module:
    module = getattr(static_models(config, torch.float64, part == INT8), part.partition(" ")[0])
    cuts = parallelize(module, tp, group)
    assert cuts.keys() <= dict(plain.named_parameters()).keys()
    fill(module, shard_state(plain.named_parameters(), cuts, rank).items())
    fill(module, plain.named_buffers())
    left = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    assert not left, f"nothing fills {left}"
    return module


def kv_heads_of(graph: Graph, config: OmniConfig) -> tuple[int, int] | None:
    """Query and KV heads of the part that keeps keys and values, if it does."""
    if graph.part == "thinker":
        return config.thinker.text.heads, config.thinker.text.kv_heads
    if graph.part == "talker":
        return config.talker.text.heads, config.talker.text.kv_heads
    if graph.part == "code2wav":
        return config.code2wav.heads, config.code2wav.kv_heads
    return None


def local(
    graph: Graph, names: list[str], tensors: list[Tensor], config: OmniConfig, tp: int, rank: int
) -> list[Tensor]:
    """A rank's part of a state: its own KV heads, and all of the rest."""
    heads = kv_heads_of(graph, config)
    if heads is None:
        return tensors
    own = key_heads(*heads, tp)
    if graph.part == "code2wav":
        return [
            of_heads(x, config.code2wav, own[rank]) if name == "state" else x
            for name, x in zip(names, tensors, strict=True)
        ]
    cuts = dict.fromkeys(("recent", "positions"), cut_heads(2, 1, own))
    return [
        shard(tensor, cuts.get(name.partition(".")[0]), rank)
        for name, tensor in zip(names, tensors, strict=True)
    ]


def of_heads(state: Tensor, c: Code2WavConfig, heads: Sequence[int]) -> Tensor:
    """State of code2wav with some of its KV heads. Keys and values are its first tensors."""
    lengths = [math.prod(shape) for shape in vocoder_state(c, c.kv_heads)]
    rows = list(state.split(lengths, 1))
    for index in range(2 * c.layers):
        by_head = rows[index].unflatten(1, (c.kv_heads, -1))
        rows[index] = torch.stack(
            [torch.zeros_like(by_head[:, 0]) if h == PAD else by_head[:, h] for h in heads], 1
        ).flatten(1)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("part", [*PARTS, INT8])
@torch.no_grad()
def test_every_graph_over_ranks_is_the_graph(graphs, double, int8, config, part, tp) -> None:
    plain, ranks = getattr(int8 if part == INT8 else double, part.partition(" ")[0]), Ranks(tp)
    modules = [rank_module(config, plain, part, tp, rank, ranks.rank(rank)) for rank in range(tp)]
    own_graphs = {g.label: g for g in all_graphs(config, replace(PLAN, tp=Degrees.same(tp)))}
    for graph in (g for g in graphs if g.part == part.partition(" ")[0]):
        example = graph.example(4)
        inputs, state = example[: len(graph.inputs)], list(example[len(graph.inputs) :])
        expected = graph.module(plain)(*example)
        in_names = [spec.name for spec in graph.state]
        out_names = [spec.name for spec in (*graph.outputs, *graph.state)]
        calls = []
        for rank, module in enumerate(modules):
            held = local(graph, in_names, state, config, tp, rank)
            calls.append(partial(own_graphs[graph.label].module(module), *inputs, *held))
        for rank, given in enumerate(ranks.run(calls)):
            wanted = local(graph, out_names, list(expected), config, tp, rank)
            torch.testing.assert_close(
                list(given), wanted, **CLOSE, msg=lambda m, g=graph, r=rank: f"{g.label} {r}: {m}"
            )
            own = own_graphs[graph.label]
            said = [spec.shape for spec in (*own.outputs, *own.state)]
            assert [tuple(t.shape) for t in given] == said, graph.label
    assert min(ranks.counted) == max(ranks.counted) > 0


def test_heads_of_the_released_model() -> None:
    assert query_heads(20, 20, 8)[6:] == [(18, 19, PAD), (PAD, PAD, PAD)]
    assert key_heads(20, 20, 4)[3] == (15, 16, 17, 18, 19)
    # thinker: 32 query and 4 KV heads; talker 16 and 2; code predictor 16 and 8
    assert key_heads(32, 4, 8) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert query_heads(32, 4, 8)[3] == (12, 13, 14, 15)
    assert key_heads(16, 2, 4) == [(0,), (0,), (1,), (1,)]
    assert key_heads(16, 8, 4)[1] == (2, 3)
    assert query_heads(16, 8, 4)[1] == (4, 5, 6, 7)
    assert local_kv_heads(32, 4, 2) == 2
    with pytest.raises(OptionError, match="6 KV heads can't be held by 4 cores"):
        key_heads(12, 6, 4)


@pytest.mark.parametrize("part", [*PARTS, INT8])
@pytest.mark.parametrize("tp", [1, again(8)])
def test_no_graph_transposes_a_parameter(config, part, tp) -> None:
    name, plan = part.partition(" ")[0], replace(TINY_PLAN, tp=Degrees.same(tp))
    module, plain = (
        getattr(static_models(config, torch.float32, part == INT8), name) for _ in range(2)
    )
    parallelize(module, tp, CountingGroup(tp))
    graphs = [graph for graph in all_graphs(config, plan) if graph.part == name]
    for graph in graphs:
        assert not graph_cost(graph, module).transposed_bytes, graph.label
    if tp == 1:
        assert any(graph_cost(graph, plain).transposed_bytes for graph in graphs), "without ranks"


def test_nothing_is_whole_at_every_rank_but_what_is_said_to_be(config, double) -> None:
    """A matrix without a rule would be whole at every rank: equal, and slow."""
    whole = ("embedding", "norm", "router", "shared.gate", "conv", "units", "depthwise")
    for part in PARTS:
        cuts = parallelize(getattr(static_models(config), part), 2, Alone())
        for name, parameter in getattr(double, part).named_parameters():
            if parameter.ndim > 1 and min(parameter.shape[:2]) > 1 and name != "head":
                assert (
                    name in cuts
                    or any(word in name for word in whole)
                    or (part == "code2wav" and name.startswith("blocks."))
                ), f"{part}: {name}"
