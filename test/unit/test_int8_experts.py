"""The thinker's experts in int8: products of their weights, in every graph and on every rank."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models
from qwen3_omni_neuron.model.config import MoeConfig, OmniConfig
from qwen3_omni_neuron.model.moe import SCALE, MoeFeedForward
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.graphs.cut import shard
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.memory import CoreMemory, core_memory, placement
from qwen3_omni_neuron.neuron.part import part_spec
from qwen3_omni_neuron.neuron.shards import (
    PartShare,
    part_shard_bytes,
    read_part_shard,
    weight_name,
    write_part_shards,
)
from testing.export import export_graph, open_shapes, rejected_ops
from testing.graph_cases import TINY_PLAN
from testing.int8_experts import int8_models
from testing.models import load_models
from testing.released import RELEASED
from testing.repeats import RUNS_ALL
from testing.specs import plan_of
from testing.torchneuron.leaner import write_leaner_checkpoint

PLAN = replace(TINY_PLAN, dtype="int8", mixed_arithmetic="bfloat16")
EXPERTS = ("ffn.gate_up", "ffn.down")
# What may be done in a graph to int8 numbers, to these in bfloat16, and to scales; what it makes.
NEXT = {
    "torch.int8": {"transpose": "torch.int8", "index_select": "torch.int8", "to": "wide"},
    "wide": {"bmm": "product"},
    "scale": {"index_select": "scale", "unsqueeze": "scale", "mul": "scaled"},
}
TYPES = {"product": torch.bfloat16, "scaled": torch.float32}
SIZES = MoeConfig(20, 3, 6, normalize_weights=True, shared_expert_width=0)


def widened(numbers: Tensor, scale: Tensor) -> Tensor:
    """The weights of int8 rows, float64: exact."""
    return numbers.double() * scale.double().unsqueeze(-1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 50])
@torch.no_grad()
def test_int8_experts_are_experts_of_their_weights(static, rows) -> None:
    torch.manual_seed(rows)
    plain = MoeFeedForward(10, SIZES).double()
    ours = MoeFeedForward(10, replace(SIZES, static=static, int8=True))
    assert ours.few_rows == 2
    ours.router = plain.router
    nn.init.normal_(plain.router.weight)
    for name in ("gate_up", "down"):
        weights = getattr(plain, name)
        # Rows of other magnitudes: a scale in the place of another one is seen.
        nn.init.normal_(weights).mul_(torch.rand(weights.shape[:-1]).unsqueeze(-1) + 0.1)
        numbers, scale = quantise(weights)
        getattr(ours, name).copy_(numbers)
        getattr(ours, name + SCALE).copy_(scale)
        weights.copy_(widened(numbers, scale))
    x = torch.randn(rows, 10).double()
    torch.testing.assert_close(ours(x), plain(x), atol=1e-12, rtol=1e-12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def config(checkpoint) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="module")
def bfloat16(checkpoint, config) -> Models:
    weights = load_models(Checkpoint(checkpoint), config, torch.bfloat16)
    return int8_models(config, weights, torch.bfloat16)


@torch.no_grad()
def test_int8_is_widened_for_the_product_alone_and_scaled_after_it(bfloat16, config) -> None:
    """In every graph, exported: no rounded weight is made, a matrix is read at a byte a number."""
    graphs = [g for g in all_graphs(config, PLAN) if g.part == "thinker" and g.outputs]
    assert len(graphs) == 8
    if not RUNS_ALL:  # few rows and many, which take the experts differently
        graphs = [g for g in graphs if g.bucket["window"] != 16]
        assert len(graphs) == 4
    for graph in graphs:
        assert {spec.dtype for spec in graph.state} == {torch.bfloat16}
        program = export_graph(graph, bfloat16.thinker)
        assert not open_shapes(program) + rejected_ops(program), graph.label
        example = graph.example(1)
        expected = graph.module(bfloat16.thinker)(*example)
        torch.testing.assert_close(program.module()(*example), expected, atol=0, rtol=0)
        check_products(program, config, graph.label)


def check_products(program: ExportedProgram, config: OmniConfig, label: str) -> None:
    kinds: dict[torch.fx.Node, str] = {}
    used: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_scale = node.name.endswith(("gate_up" + SCALE, "down" + SCALE))
            kinds[node] = "scale" if is_scale else str(node.meta["val"].dtype)
        taken = [kind for given in node.all_input_nodes if (kind := kinds.get(given)) in NEXT]
        if node.op != "call_function" or not taken or "_assert" in str(node.target):
            continue
        name = str(node.target).split(".")[1]
        assert name in NEXT[taken[0]], f"{label}: {name} of {taken[0]}"
        kinds[node] = NEXT[taken[0]][name]
        if kinds[node] in ("product", "scaled"):
            used[kinds[node]] += 1
            assert node.meta["val"].dtype == TYPES[kinds[node]]
    matrices = 2 * config.thinker.text.layers
    assert used == {"product": matrices, "scaled": matrices}, label


def written(
    checkpoint: Path, config: OmniConfig, folder: Path, plan: CompilePlan
) -> list[dict[str, Tensor]]:
    """The tensors of the thinker's files, by rank; matrices [out, in]."""
    folder.mkdir()
    spec = part_spec(config, plan, "thinker")
    write_part_shards(spec, Checkpoint(checkpoint), folder)
    files = sorted((folder / "weights").iterdir())
    assert sum(file.stat().st_size for file in files) - part_shard_bytes(spec) < 100_000
    share = PartShare(spec, Alone())
    exchanged = {weight_name(name) for name, cut in share.cuts.items() if cut.transposed}
    shards = [read_part_shard(folder, rank, share.weights) for rank in range(spec.tp)]
    return [
        {n.removeprefix("owner."): t.mT if n in exchanged else t for n, t in s.items()}
        for s in shards
    ]


def experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n.removesuffix(SCALE).endswith(EXPERTS)}


def test_the_files_have_the_cpus_numbers_and_all_else_in_bfloat16(
    checkpoint, config, tmp_path
) -> None:
    (tensors,) = written(checkpoint, config, tmp_path / "ours", PLAN)
    (plain,) = written(checkpoint, config, tmp_path / "plain", replace(PLAN, dtype="bfloat16"))
    cpu = load_checkpoint_models(Checkpoint(checkpoint), config, "int8", ["thinker"], packed=False)
    theirs = dict(cpu.thinker.named_parameters())
    names = {n for n in theirs if n.endswith(EXPERTS)}
    assert experts(tensors).keys() == names | {n + SCALE for n in names}
    for name in names:
        assert tensors[name].dtype == torch.int8
        assert tensors[name + SCALE].dtype == torch.float32
        wide = tensors[name].float() * tensors[name + SCALE].unsqueeze(-1)
        assert torch.equal(wide, theirs[name]), name
    for name in plain.keys() - names:
        assert torch.equal(tensors[name], plain[name]), name
    assert {plain[n].dtype for n in plain.keys() - names} >= {torch.bfloat16}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_has_the_scales_of_its_outputs(checkpoint, config, tmp_path, tp) -> None:
    (whole,) = written(checkpoint, config, tmp_path / "whole", PLAN)
    ranks = written(checkpoint, config, tmp_path / "ranks", replace(PLAN, tp=Degrees.same(tp)))
    cuts = PartShare(part_spec(config, replace(PLAN, tp=Degrees.same(tp)), "thinker"), Alone()).cuts
    width = config.thinker.text.moe.expert_width
    for name, tensor in experts(whole).items():
        for rank, held in enumerate(ranks):
            cut = cuts.get(name)
            part = tensor if cut is None else shard(tensor, replace(cut, transposed=False), rank)
            assert torch.equal(held[name], part), name
        if name.endswith("gate_up" + SCALE):
            assert held[name].shape[1] == 2 * width // tp
        if name.endswith("down" + SCALE):
            assert held[name].shape == tensor.shape


TRN2_PAGE = (Path(__file__).parents[2] / "docs" / "trn2.md").read_text(encoding="utf-8")
DTYPES = ("bfloat16", "int8")


def table_of_page(head: str) -> dict[str, list[str]]:
    """The cells of a table of docs/trn2.md, by the first of each row."""
    lines = TRN2_PAGE.split(f"| {head} |")[1].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return {name: cells for name, *cells in rows}


def memory(dtype: str, **sizes: int) -> CoreMemory:
    plan = plan_of(Path(), RELEASED, "torchneuron", tp=4, dtype=dtype, **sizes)
    return core_memory(RELEASED, plan, (plan.tp,))


@pytest.mark.release
def test_the_page_says_what_fits_a_trn2_in_either_dtype() -> None:
    thinker, whole, slots, positions = table_of_page("TP 4, `shared` | bfloat16 | int8").values()
    for place, dtype in enumerate(DTYPES):
        counted = memory(dtype)
        shards = {part.name: part.shard_bytes[counted.plan.tp] for part in counted.parts}
        assert thinker[place] == f"{shards['thinker'] / 1e9:.2f}"
        assert whole[place] == f"{counted.core_bytes(counted.plan.tp) / 1e9:.2f}"
        for name, most, step in (
            ("max_concurrency", int(slots[place]), 1),
            ("context_length", int(positions[place]), 1024),
        ):
            fits, does_not = (memory(dtype, **{name: size}) for size in (most, most + step))
            found = [placement(one, one.plan.tp, "trn2.3xlarge")[0] for one in (fits, does_not)]
            assert found == ["shared", None], name
    assert f"{counted.nbytes / 1e9:.1f} GB in all" in TRN2_PAGE
    c = RELEASED.thinker.text
    experts = 3 * c.moe.experts * c.moe.expert_width * c.hidden_size * c.layers
    assert f"{2 * experts / 1e9:.1f} of the 70.5 GB" in TRN2_PAGE
