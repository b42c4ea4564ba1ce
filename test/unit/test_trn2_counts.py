"""Costs of whole graphs by hand, and the layers that are counted once."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench.trn2 import counts
from bench.trn2.cost import Cost, CountingGroup, floor_s, graph_cost
from bench.trn2.counts import count_graphs, ranks_of
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs import weights
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED, TALKER, of_depth

PLAN = replace(
    TINY_PLAN, dtype="bfloat16", max_concurrency=1, context_length=8192,
    talker_context_length=8192, prompt_buckets=(1300,), decode_buckets=(256,), batches=(1,),
    chunked_prefill=False,
)  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks" / "trn2.md").read_text(encoding="utf-8")


def test_floors_on_two_chips_are_the_published_ones() -> None:
    """Time to read the weights of one call at the bandwidth of two chips, each weight once."""
    models = static_models(RELEASED)
    floors_ms = {
        "thinker_decode": 1.05, "thinker_prefill": 10.4, "talker_decode": 0.10,
        "code_predictor": 0.40,
    }  # fmt: skip
    for graph in all_graphs(RELEASED, PLAN):
        if floor_ms := floors_ms.pop(graph.name, None):
            cost = graph_cost(graph, getattr(models, graph.part))
            assert cost.weight_bytes / (2 * 2.9e12) * 1e3 == pytest.approx(floor_ms, rel=0.06)
            if graph.name == "code_predictor":  # 15 times four a layer and the head
                assert cost.chain == 15 * (5 * 4 + 1)
    assert not floors_ms


def test_a_call_copies_one_buffer_each_way_and_what_is_large_in_bfloat16() -> None:
    """Rows of a prompt of 512: inputs, deepstack's, and the thinker's hidden states."""
    plan = replace(PLAN, max_concurrency=8, batches=(8,), prompt_buckets=(512,))
    graphs = all_graphs(RELEASED, replace(plan, chunked_prefill=True))
    copies = {graph.name: graph.copies for graph in graphs}
    assert copies.pop("thinker_prefill") == 5
    assert copies.pop("talker_prefill") == 3
    assert copies.pop("thinker_flush") == copies.pop("talker_flush") == 1
    assert set(copies.values()) == {2}


def test_collectives_of_a_decode_step() -> None:
    """Two sums a layer, and the logits gathered: 48 * 2 + 1; the same of every call."""
    plan, group = replace(PLAN, tp=Degrees.same(8)), CountingGroup(8)
    models = static_models(RELEASED)
    parallelize(models.thinker, 8, group)
    graph = next(g for g in all_graphs(RELEASED, plan) if g.name == "thinker_decode")
    for _ in range(2):
        cost = graph_cost(graph, models.thinker, group)
        assert cost.sums == 97
        assert cost.sum_bytes == 96 * 2048 * 2 + 152064 // 8 * 2


def test_the_cost_table_of_the_document_is_what_is_counted() -> None:
    """Counted over two and three layers, of which the others are repetitions."""
    lines = PAGE.split("| MB KV cache | floor ms |\n")[1].splitlines()[1:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    assert [label for label, *_ in rows] == [
        "thinker_prefill[rows=128,window=512]",
        "thinker_prefill[rows=512,window=512]",
        "thinker_prefill[rows=512,window=2048]",
        "thinker_prefill[rows=128,window=8192]",
        "thinker_flush[window=2048]",
        "talker_prefill[rows=128,window=2048]",
    ]
    plan = replace(PLAN, tp=Degrees.same(8), max_concurrency=8, prompt_buckets=(128, 512))
    plan = replace(plan, decode_buckets=(512, 2048, 8192), chunked_prefill=True)
    counted: list[dict[str, Cost]] = []
    for layers in (2, 3):
        models = static_models(of_depth(layers))
        for part in ("thinker", "talker"):
            parallelize(getattr(models, part), 8, CountingGroup(8))
        graphs = {graph.label: graph for graph in all_graphs(of_depth(layers), plan)}
        counted.append(
            {
                label: graph_cost(graphs[label], getattr(models, graphs[label].part))
                for label, *_ in rows
            }
        )
    for label, *said in rows:
        two, three = (costs[label] for costs in counted)
        decoder = TALKER.text if label.startswith("talker") else RELEASED.thinker.text
        flops, weight_bytes, state_bytes = (
            a + (decoder.layers - 2) * (b - a)
            for a, b in (
                (two.flops, three.flops),
                (two.weight_bytes, three.weight_bytes),
                (two.state_bytes, three.state_bytes),
            )
        )
        floor = floor_s(flops, weight_bytes + state_bytes)
        counts = (flops / 1e9, weight_bytes / 1e6, state_bytes / 1e6)
        assert said == [*(f"{count:.0f}" for count in counts), f"{floor * 1e3:.1f}"], label


def test_layers_that_repeat_are_counted_once_and_exactly(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6 layers of every part: the same cost as of all of them, from 5 at most.

    Heads are as wide as the released ones.
    """
    plan = replace(TINY_PLAN, prompt_buckets=(12,), decode_buckets=(64,), patch_buckets=(64,),
                   audio_windows=(1,), batches=(3,), chunk_frames=(4,))  # fmt: skip
    thinker, talker = config.thinker, config.talker
    heads = {"head_dim": 128, "rope": RELEASED.thinker.text.rope}
    assert talker is not None and config.code2wav is not None
    deep = replace(
        config,
        thinker=replace(
            thinker,
            text=replace(thinker.text, layers=6, **heads),
            audio=replace(thinker.audio, layers=6),
            vision=replace(thinker.vision, layers=6, deepstack_layers=(1, 3, 5)),
        ),
        talker=replace(
            talker,
            text=replace(talker.text, layers=6, **heads),
            predictor=replace(talker.predictor, layers=6),
            accept_hidden_layer=4,
        ),
        code2wav=replace(config.code2wav, layers=6),
    )
    tp = Degrees(thinker=2, talker=1, predictor=1, vocoder=2, encoders=1)
    rank, groups = ranks_of(deep, replace(plan, tp=tp))
    depths: set[int] = set()

    def counted(graph: object, owner: object, group: CountingGroup) -> Cost:
        depths.update(len(m.layers) for m in owner.modules() if hasattr(m, "layers"))  # type: ignore[attr-defined]
        return graph_cost(graph, owner, group)  # type: ignore[arg-type]

    monkeypatch.setattr(counts, "graph_cost", counted)
    monkeypatch.setattr(weights, "SMALL", 2**8)
    monkeypatch.setattr(weights, "MOST_ELEMENTS", 2**14)  # so that some layers fill a tensor
    found = count_graphs(deep, plan, (tp,))
    assert max(depths) == 5
    for one in found:
        part = one.graph.part
        assert one.tp == replace(plan, tp=tp).degree(part)
        whole = graph_cost(one.graph, getattr(rank, part), groups[part])
        for field in fields(Cost):
            ours, theirs = getattr(one.cost, field.name), getattr(whole, field.name)
            if isinstance(theirs, tuple):
                ours, theirs = sorted(map(str, ours)), sorted(map(str, theirs))
            elif isinstance(theirs, float):
                theirs = pytest.approx(theirs)
            elif field.name in ("instructions", "descriptors"):  # small rows of layers share a tile
                theirs = pytest.approx(theirs, rel=0.04, abs=5)
            assert ours == theirs, (one.graph.label, field.name)
