"""The plan of a compile, at the released sizes, against published totals and counts by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.graphs.cost import Cost, CountingGroup, graph_cost
from qwen3_omni_neuron.graphs.dry_run import DryRun, PlannedGraph, dry_run, dry_run_text
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.graphs.hardware import TRN2
from qwen3_omni_neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.model.config import OmniConfig
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED

PROMPT = 1300  # rows, of the published estimate
PLAN = replace(
    TINY_PLAN,
    dtype="bfloat16",
    max_concurrency=1,
    context_length=8192,
    talker_context_length=8192,
    prompt_buckets=(PROMPT,),
    decode_buckets=(256,),
    patch_buckets=(256,),
    audio_windows=(1,),
    projection_rows=(512,),
    batches=(1,),
    chunk_frames=(1,),
)
TWO_CHIPS = 2 * TRN2.bytes_per_s


@pytest.fixture(scope="module")
def plan() -> DryRun:
    return dry_run(RELEASED, PLAN, degrees=(1, 8))


def planned(plan: DryRun, name: str, tp: int) -> PlannedGraph:
    return next(p for p in plan.graphs if p.graph.name == name and p.tp == tp)


def test_the_released_totals(plan: DryRun) -> None:
    """As published: 35.3 B parameters and 70.5 GB in bfloat16."""
    assert round(plan.parameters / 1e9, 1) == 35.3
    assert round(plan.nbytes / 1e9, 1) == 70.5
    sizes = {part.name: part.parameters for part in plan.parts}
    assert round(sizes["thinker"] / 1e9, 1) == 30.5
    assert round(sizes["talker"] / 1e9, 1) == 3.2
    assert round(sizes["code2wav"] / 1e9, 1) == 0.2


def test_what_two_parts_share_is_counted_once(plan: DryRun) -> None:
    """The talker's table of code 0, which the code predictor reads too."""
    models = static_models(RELEASED)
    parameters = {id(p): p for part in PARTS for p in getattr(models, part).parameters()}
    assert plan.parameters == sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize(
    ("name", "floor_ms"),
    [
        ("thinker_decode", 1.05),
        ("thinker_prefill", 10.4),
        ("talker_decode", 0.10),
        ("code_predictor_greedy", 0.40),
    ],
)
def test_floors_on_two_chips(plan: DryRun, name: str, floor_ms: float) -> None:
    """What the weights of one call take at the bandwidth of two chips, none of them held twice."""
    weights = planned(plan, name, 1).cost.weight_bytes
    assert weights / TWO_CHIPS * 1e3 == pytest.approx(floor_ms, rel=0.06)


def test_a_core_of_eight_holds_an_eighth_and_what_is_whole_everywhere(plan: DryRun) -> None:
    for part in plan.parts:
        assert part.shard_bytes[1] == part.nbytes
        assert part.nbytes / 8 < part.shard_bytes[8] < part.nbytes
    thinker = next(part for part in plan.parts if part.name == "thinker")
    embedding = 152064 * 2048 * 2
    whole = embedding + 48 * 2 * (128 * 2048 + 2 * 2048) + 2 * 2048  # routers and norms
    qk_norms = 48 * 2 * 128  # bytes of a head's norm, of all layers
    kv = 48 * 2 * 2 * 128 * 2048  # bytes of one head of keys and one of values
    matrices = thinker.nbytes - whole - 4 * kv - 36 * qk_norms
    assert thinker.shard_bytes[8] == whole + matrices / 8 + kv + 5 * qk_norms


def test_state_of_the_thinker(plan: DryRun) -> None:
    """48 layers, keys and values, 8192 positions of 128 in bfloat16: 4 heads, or 1 of 8 cores."""
    line = 48 * 2 * 8192 * 128 * 2
    assert plan.state_bytes[1]["thinker"] == 4 * line
    assert plan.state_bytes[8]["thinker"] == line


def test_collectives_of_a_decode_step(plan: DryRun) -> None:
    """Two sums a layer, and the logits gathered: 48 * 2 + 1."""
    cost = planned(plan, "thinker_decode", 8).cost
    assert cost.sums == 97
    assert cost.sum_bytes == 96 * 2048 * 2 + 152064 // 8 * 2


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    assert TRN2.floor_s(667e12, 0) == TRN2.floor_s(0, 2.9e12) == 4
    assert TRN2.floor_s(667e12, 5.8e12) == 8


def test_text_names_every_part_and_graph(plan: DryRun) -> None:
    text = dry_run_text(plan)
    assert text.startswith("35.3 B parameters, 70.5 GB.")
    assert "| part | parameters | GB | GB a core, TP 1 | GB a core, TP 8 |" in text
    for graph in plan.graphs:
        assert f"| {graph.graph.label} | {graph.tp} |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (6, 9) for line in rows)


def test_a_degree_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="KV heads can't be held by 3 cores"):
        dry_run(RELEASED, PLAN, degrees=(3,))


def cost_of(config: OmniConfig, models: Models, name: str, tp: int = 1) -> tuple[Graph, Cost]:
    graphs = all_graphs(config, replace(TINY_PLAN, tp=tp))
    graph = next(g for g in graphs if g.name == name)
    return graph, graph_cost(graph, getattr(models, graph.part))


def test_weights_that_the_code_predictor_reads(config: OmniConfig) -> None:
    """Its decoder and one head 15 times, and an embedding for each of 16 codes."""
    models = static_models(config, torch.float32)
    _, cost = cost_of(config, models, "code_predictor_greedy")
    c = config.talker.predictor
    decoder = sum(p.nbytes for p in models.code_predictor.decoder.parameters())
    head, row = c.vocab_size * c.hidden_size * 4, c.hidden_size * 4
    assert cost.weight_bytes == 15 * decoder + 15 * head + 16 * row


def test_one_row_reads_the_experts_that_it_chose(config: OmniConfig) -> None:
    models = static_models(config, torch.float32)
    _, cost = cost_of(config, models, "thinker_decode")
    c = config.thinker.text
    experts = sum(p.nbytes for n, p in models.thinker.named_parameters() if n.endswith("gate_up"))
    experts += sum(p.nbytes for n, p in models.thinker.named_parameters() if n.endswith("down"))
    others = sum(p.nbytes for p in models.thinker.parameters()) - experts
    others -= (c.vocab_size - 1) * c.hidden_size * 4  # one row of the embedding
    chosen = experts * c.moe.experts_per_token // c.moe.experts
    assert cost.weight_bytes == others + chosen


def test_state_that_a_step_reads_and_writes(config: OmniConfig) -> None:
    """The window of one line, and one row, which is looked at before it is written."""
    models = static_models(config, torch.float32)
    graph, cost = cost_of(config, models, "talker_decode")
    row = config.talker.text.kv_heads * config.talker.text.head_dim * 4
    tensors = len(graph.state)
    assert cost.state_bytes == tensors * row * (graph.bucket["window"] + 2)


def test_flops_of_a_matrix_and_of_attention(config: OmniConfig) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return nn.functional.scaled_dot_product_attention(y, y, y)

    spec = (TensorSpec("x", (1, 2, 7, 6), torch.float32),)
    graph = Graph("mixed", {}, "", lambda owner, x, state: ((owner(*x),), state), spec, ())
    cost = graph_cost(graph, Mixed())
    assert cost.flops == 2 * (2 * 7) * 6 * 5 + 2 * (2 * 7 * 7 * 5) * 2
    assert cost.weight_bytes == (6 * 5 + 5) * 4


def test_collectives_are_counted_a_call(config: OmniConfig) -> None:
    models, group = static_models(config, torch.float32), CountingGroup(2)
    parallelize(models.hidden_projection, 2, group)
    graph = next(g for g in all_graphs(config, TINY_PLAN) if g.part == "hidden_projection")
    for _ in range(2):
        cost = graph_cost(graph, models.hidden_projection, group)
        assert (cost.sums, cost.sum_bytes) == (1, 8 * config.talker.text.hidden_size * 4)
