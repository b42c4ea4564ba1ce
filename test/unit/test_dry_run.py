"""The plan of a compile, at the released sizes, against published totals and counts by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART, CompilePlan
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import PARTS, all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.cost import TRN2, Cost, CountingGroup, graph_cost
from qwen3_omni_neuron.neuron.graphs.decoders import decode_graph, flush_graph, prompt_graph
from qwen3_omni_neuron.neuron.graphs.dry_run import (
    CoreMemory,
    DryRun,
    PlannedGraph,
    core_memory,
    does_not_fit,
    dry_run,
    dry_run_text,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.neuron.torchneuron.target import TORCHNEURON
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED, TALKER, of_depth
from testing.torchneuron.leaner import write_leaner_checkpoint

ONE, FOUR, EIGHT = map(Degrees.same, (1, 4, 8))
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
    chunked_prefill=False,
)
TRN2_PAGE = (Path(__file__).parents[2] / "docs" / "trn2.md").read_text(encoding="utf-8")
TWO_CHIPS = 2 * TRN2.bytes_per_s


# Released widths: counting a graph takes a time by its layers.
SHALLOW = replace(
    RELEASED,
    thinker=replace(
        RELEASED.thinker,
        text=replace(RELEASED.thinker.text, layers=2),
        audio=replace(RELEASED.thinker.audio, layers=2),
        vision=replace(RELEASED.thinker.vision, layers=2, deepstack_layers=(0, 1)),
    ),
    talker=replace(
        TALKER,
        text=replace(TALKER.text, layers=2),
        predictor=replace(TALKER.predictor, layers=2),
        accept_hidden_layer=1,
    ),
    code2wav=replace(RELEASED.code2wav, layers=2),
)


@pytest.fixture(scope="module")
def plan() -> CoreMemory:
    return core_memory(RELEASED, PLAN, (ONE, EIGHT))


@pytest.fixture(scope="module")
def whole() -> Models:
    return static_models(RELEASED)


@pytest.fixture(scope="module")
def shallow() -> DryRun:
    few = replace(PLAN, context_length=512, talker_context_length=512, prompt_buckets=(128,))
    few = replace(few, max_concurrency=2, chunked_prefill=True)
    return dry_run(SHALLOW, few, degrees=(EIGHT,))


def planned(plan: DryRun, name: str, tp: int) -> PlannedGraph:
    return next(p for p in plan.graphs if p.graph.name == name and p.tp == tp)


def test_the_released_totals(plan: CoreMemory) -> None:
    """The published sizes: 35.3 B parameters and 70.5 GB in bfloat16."""
    assert round(plan.parameters / 1e9, 1) == 35.3
    assert round(plan.nbytes / 1e9, 1) == 70.5
    sizes = {part.name: part.parameters for part in plan.parts}
    assert round(sizes["thinker"] / 1e9, 1) == 30.5
    assert round(sizes["talker"] / 1e9, 1) == 3.2
    assert round(sizes["code2wav"] / 1e9, 1) == 0.2


def test_what_two_parts_share_is_counted_once(plan: CoreMemory, whole: Models) -> None:
    """The talker's table of code 0, which the code predictor reads too."""
    parameters = {id(p): p for part in PARTS for p in getattr(whole, part).parameters()}
    assert plan.parameters == sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize(
    ("name", "floor_ms"),
    [
        ("thinker_decode", 1.05),
        ("thinker_prefill", 10.4),
        ("talker_decode", 0.10),
        ("code_predictor", 0.40),
    ],
)
def test_floors_on_two_chips(whole: Models, name: str, floor_ms: float) -> None:
    """Time to read the weights of one call at the bandwidth of two chips, each weight once."""
    _, cost = cost_of(RELEASED, whole, name, PLAN)
    assert cost.weight_bytes / TWO_CHIPS * 1e3 == pytest.approx(floor_ms, rel=0.06)


def test_a_core_of_eight_holds_an_eighth_and_what_is_whole_everywhere(plan: CoreMemory) -> None:
    for part in plan.parts:
        assert part.shard_bytes[ONE] == part.nbytes
        assert part.nbytes / 8 < part.shard_bytes[EIGHT] < part.nbytes
    thinker = next(part for part in plan.parts if part.name == "thinker")
    embedding = 152064 * 2048 * 2
    whole = embedding + 48 * 2 * (128 * 2048 + 2 * 2048) + 2 * 2048  # routers and norms
    qk_norms = 48 * 2 * 128  # bytes of a head's norm, of all layers
    kv = 48 * 2 * 2 * 128 * 2048  # bytes of one head of keys and one of values
    matrices = thinker.nbytes - whole - 4 * kv - 36 * qk_norms
    assert thinker.shard_bytes[EIGHT] == whole + matrices / 8 + kv + 5 * qk_norms


def test_state_of_the_thinker(plan: CoreMemory) -> None:
    """48 layers, keys and values, 8192 positions and 32 recent rows of 128 in bfloat16: 4 heads, or
    1 of 8 cores."""
    line = 48 * 2 * (8192 + 32) * 128 * 2
    assert plan.state_bytes[ONE]["thinker"] == 4 * line
    assert plan.state_bytes[EIGHT]["thinker"] == line


def test_collectives_of_a_decode_step() -> None:
    """Two sums a layer, and the logits gathered: 48 * 2 + 1."""
    models, group = static_models(RELEASED), CountingGroup(8)
    parallelize(models.thinker, 8, group)
    _, cost = cost_of(RELEASED, models, "thinker_decode", replace(PLAN, tp=Degrees.same(8)), group)
    assert cost.sums == 97
    assert cost.sum_bytes == 96 * 2048 * 2 + 152064 // 8 * 2


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    assert TRN2.floor_s(667e12, 0) == TRN2.floor_s(0, 2.9e12) == 4
    assert TRN2.floor_s(667e12, 5.8e12) == 8


def test_text_names_every_part_and_graph(plan: CoreMemory, shallow: DryRun) -> None:
    assert {graph.graph.part for graph in shallow.graphs} == set(PARTS)
    text = dry_run_text(DryRun(**vars(plan), graphs=shallow.graphs))
    assert text.startswith("35.3 B parameters, 70.5 GB.")
    assert "| part | parameters | GB | GB a core, TP 1 | GB a core, TP 8 |" in text
    for graph in shallow.graphs:
        assert f"| {graph.graph.label} | {graph.tp} |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (6, 10) for line in rows)


def test_a_degree_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="KV heads can't be held by 3 cores"):
        dry_run(RELEASED, PLAN, degrees=(Degrees.same(3),))


def test_the_cost_table_of_the_document_is_what_is_counted() -> None:
    """Counted over two and three layers, of which the others are repetitions."""
    lines = TRN2_PAGE.split("| MB KV cache | floor ms |\n")[1].splitlines()[1:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    assert [label for label, *_ in rows] == [
        "thinker_prefill[rows=128,window=512]",
        "thinker_prefill[rows=512,window=512]",
        "thinker_prefill[rows=512,window=2048]",
        "thinker_prefill[rows=128,window=8192]",
        "thinker_flush[window=2048]",
        "talker_prefill[rows=128,window=2048]",
    ]
    plan = replace(PLAN, tp=EIGHT, max_concurrency=8, prompt_buckets=(128, 512))
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
        floor = TRN2.floor_s(flops, weight_bytes + state_bytes)
        counts = (flops / 1e9, weight_bytes / 1e6, state_bytes / 1e6)
        assert said == [*(f"{count:.0f}" for count in counts), f"{floor * 1e3:.1f}"], label


def test_a_plan_with_chunked_prefill_has_its_graphs_in_the_text(shallow: DryRun) -> None:
    text = dry_run_text(shallow)
    for name in ("thinker", "talker"):
        assert f"| {name}_prefill[rows=128,window=256] | 8 |" in text
    assert planned(shallow, "thinker_flush", 8).floor_s > 0
    whole = all_graphs(SHALLOW, replace(shallow.plan, chunked_prefill=False))
    assert not [graph.name for graph in whole if "flush" in graph.name], "NxDI has none"


# The memory of a core, with 8 slots of 8192 positions, the talker's of 12297: the defaults.

MEMORY_PLAN = replace(PLAN, max_concurrency=8, talker_context_length=12297)
DEFAULTS = [TORCHNEURON.limits.tp[name] for name in ("trn2.3xlarge", "trn2.48xlarge")]


@pytest.fixture(scope="module")
def memory() -> CoreMemory:
    return core_memory(RELEASED, MEMORY_PLAN, (FOUR, EIGHT, *DEFAULTS))


def test_the_memory_table_of_the_document_is_what_is_counted(memory: CoreMemory) -> None:
    columns, weights = (FOUR, EIGHT, *DEFAULTS), {p.name: p.shard_bytes for p in memory.parts}
    projections = ("text_projection", "hidden_projection")
    # By row of the table: the parts whose weights, and those whose state, are in it.
    table = {
        "thinker": (("thinker",), ()),
        "its KV cache": ((), ("thinker",)),
        "talker, its projections and KV cache": (("talker", *projections), ("talker",)),
        "code predictor": (("code_predictor",), ()),
        "code2wav": (("code2wav",), ("code2wav",)),
        "encoders": (("audio_encoder", "vision_encoder"), ()),
    }
    counted = {
        name: [
            sum(weights[part][tp] for part in held) + sum(memory.state_bytes[tp][p] for p in kept)
            for tp in columns
        ]
        for name, (held, kept) in table.items()
    }
    for tp, nbytes in zip(columns, zip(*counted.values(), strict=True), strict=True):
        assert sum(nbytes) == memory.core_bytes(tp)
    for name, sizes in counted.items():
        assert f"| {name} | {' | '.join(f'{size / 1e9:.2f}' for size in sizes)} |\n" in TRN2_PAGE
    all_of_it = " | ".join(f"{memory.core_bytes(tp) / 1e9:.1f}" for tp in columns)
    assert f"| all, as `shared` has it | {all_of_it} |\n" in TRN2_PAGE


def test_the_fullest_core_of_mixed_degrees_is_the_first(memory: CoreMemory) -> None:
    """It has what a core has of each part at the part's own degree, state included."""
    small = DEFAULTS[0]
    for tp, same in zip(DEFAULTS, (FOUR, EIGHT), strict=True):
        for part in memory.parts:
            whole = tp.of(MODEL_OF_PART[part.name]) == 1
            held = part.nbytes if whole else part.shard_bytes[same]
            assert part.shard_bytes[tp] == held, part.name
    full = replace(memory.chip, memory_bytes=memory.chip.cores * memory.core_bytes(FOUR))
    crowded = replace(memory, chip=full)
    assert not does_not_fit(crowded, FOUR)
    assert does_not_fit(crowded, small).startswith(
        "TP thinker=4,talker=4,predictor=1,vocoder=1,encoders=4 does not fit: "
    )
    assert "; tp 8; " in does_not_fit(crowded, small)


def test_what_fits_is_not_complained_of(memory: CoreMemory) -> None:
    assert not any(does_not_fit(memory, tp) for tp in (FOUR, EIGHT, *DEFAULTS))


def test_what_does_not_fit_shared_says_what_does() -> None:
    slots = core_memory(RELEASED, replace(MEMORY_PLAN, max_concurrency=32), (FOUR,))
    assert does_not_fit(slots, FOUR) == (
        "TP 4 does not fit: 28.92 of 25.8 GB a core with placement shared. Change one or more of: "
        "placement split (22.84 GB on each core of the thinker); tp 8; fewer slots or a shorter "
        "context length (the state of 32 slots is 10.53 GB)."
    )


def test_a_core_at_lnc_1_has_half_the_memory(memory: CoreMemory) -> None:
    one = core_memory(RELEASED, replace(MEMORY_PLAN, lnc=1), (FOUR,))
    assert one.core_bytes(FOUR) == memory.core_bytes(FOUR)
    assert (one.chip.cores, one.chip.core_bytes) == (8, 12 * 2**30)
    assert does_not_fit(one, FOUR) == (
        "TP 4 does not fit: 21.02 of 12.9 GB a core with placement shared, 17.99 GB on each core "
        "of the thinker with placement split. Change one or more of: lnc 2 (25.8 GB a core); tp 8; "
        "fewer slots or a shorter context length (the state of 8 slots is 2.63 GB)."
    )


def test_lnc_is_in_the_floors(tmp_path: Path) -> None:
    """A core of one physical core has half of the bandwidth and of the peak."""
    config = read_config(write_leaner_checkpoint(tmp_path))
    few = replace(PLAN, dtype="float32", context_length=64, talker_context_length=64)
    few = replace(few, prompt_buckets=(16,), decode_buckets=(64,))
    two, one = (
        dry_run(config, plan, degrees=(Degrees.same(2),)) for plan in (few, replace(few, lnc=1))
    )
    for graph in ("thinker_decode", "audio_encoder"):
        assert planned(one, graph, 2).floor_s == 2 * planned(two, graph, 2).floor_s


def cost_of(
    config: OmniConfig,
    models: Models,
    name: str,
    plan: CompilePlan = TINY_PLAN,
    group: CountingGroup | None = None,
) -> tuple[Graph, Cost]:
    graph = next(g for g in all_graphs(config, plan) if g.name == name)
    return graph, graph_cost(graph, getattr(models, graph.part), group)


def test_the_code_predictors_weights_are_counted_once_a_code(config: OmniConfig) -> None:
    """Its decoder and one head 15 times, and an embedding for each of 16 codes of a slot."""
    models = static_models(config, torch.float32)
    _, cost = cost_of(config, models, "code_predictor")
    c = config.talker.predictor
    decoder = sum(p.nbytes for p in models.code_predictor.decoder.parameters())
    head, row = c.vocab_size * c.hidden_size * 4, c.hidden_size * 4
    slots = TINY_PLAN.max_concurrency
    assert cost.weight_bytes == 15 * decoder + 15 * head + 16 * row * slots


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


def state_bytes_of_a_window(config: OmniConfig, graph: Callable[[int], Graph]) -> tuple[int, int]:
    """Return what a window of 64 positions adds to one of 16, and the same positions of a slot."""
    talker, c = static_models(config, torch.float32).talker, config.talker.text
    short, long = (graph_cost(graph(window), talker).state_bytes for window in (16, 64))
    return long - short, 2 * c.layers * (64 - 16) * c.kv_heads * c.head_dim * 4


@pytest.mark.parametrize("slots", [1, 3])
def test_a_step_only_reads_its_window_and_of_its_slots_alone(
    config: OmniConfig, slots: int
) -> None:
    """It writes recent rows, whatever the window."""
    added, of_a_slot = state_bytes_of_a_window(
        config, lambda window: decode_graph(config, "talker", slots, window, TINY_PLAN)
    )
    assert added == slots * of_a_slot


def test_a_prefill_renews_its_window(config: OmniConfig) -> None:
    """That of all slots is read and written, that of its own read by attention."""
    added, of_a_slot = state_bytes_of_a_window(
        config, lambda window: prompt_graph(config, "talker", 8, window, TINY_PLAN)
    )
    assert added == (2 * TINY_PLAN.max_concurrency + 1) * of_a_slot


def test_a_prefill_attends_to_its_window(config: OmniConfig) -> None:
    """Every row, masked or not."""
    models, c, rows = static_models(config, torch.float32), config.talker.text, 8
    costs = {
        window: graph_cost(prompt_graph(config, "talker", rows, window, TINY_PLAN), models.talker)
        for window in (16, 64)
    }
    # scores and mixed values, a product and a sum each; the placing of keys and values
    further = 2 * 2 * c.head_dim * rows * (64 - 16) * (c.heads + c.kv_heads) * c.layers
    assert costs[64].flops - costs[16].flops == further
    assert costs[64].weight_bytes == costs[16].weight_bytes


def test_a_flush_renews_its_window(config: OmniConfig) -> None:
    """That of all slots is read and written, and that of the slot that is copied read."""
    added, of_a_slot = state_bytes_of_a_window(
        config, lambda window: flush_graph(config, "talker", window, TINY_PLAN)
    )
    assert added == (2 * TINY_PLAN.max_concurrency + 1) * of_a_slot


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
