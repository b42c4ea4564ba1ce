"""Memory that plans take on a core at the released sizes, against published totals."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.graphs.all import PARTS, static_models
from qwen3_omni_neuron.neuron.graphs.memory import (
    CoreMemory,
    core_memory,
    instances_of,
    placement,
    plan_lines,
    plan_report,
)
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from testing.graph_cases import TINY_PLAN
from testing.released import RELEASED
from testing.torchneuron.leaner import write_leaner_checkpoint

ONE, TWO, FOUR, EIGHT = map(Degrees.same, (1, 2, 4, 8))
SMALL, LARGE = "trn2.3xlarge", "trn2.48xlarge"
DEFAULTS = TORCHNEURON.limits.tp
# 8 slots of 8192 positions, the talker's of 12297: the defaults.
PLAN = replace(
    TINY_PLAN, dtype="bfloat16", tp=EIGHT, max_concurrency=8, context_length=8192,
    talker_context_length=12297, prompt_buckets=(128, 512), decode_buckets=(256,),
    patch_buckets=(256,), audio_windows=(1,), projection_rows=(512,), batches=(1,),
    chunk_frames=(1,),
)  # fmt: skip
TRN2_PAGE = (Path(__file__).parents[2] / "docs" / "trn2.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def memory() -> CoreMemory:
    return core_memory(RELEASED, PLAN, (ONE, FOUR, EIGHT, DEFAULTS[SMALL], DEFAULTS[LARGE]))


def test_the_released_totals(memory) -> None:
    """The published sizes. The talker's table of code 0, which two parts have, is counted once."""
    assert round(memory.parameters / 1e9, 1) == 35.3
    assert round(memory.nbytes / 1e9, 1) == 70.5
    sizes = {part.name: round(part.parameters / 1e9, 1) for part in memory.parts}
    assert (sizes["thinker"], sizes["talker"], sizes["code2wav"]) == (30.5, 3.2, 0.2)
    models = static_models(RELEASED)
    parameters = {id(p): p for part in PARTS for p in getattr(models, part).parameters()}
    assert memory.parameters == sum(p.numel() for p in parameters.values())


def test_a_degree_that_the_kv_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(OptionError, match="KV heads can't be held by 3 cores"):
        core_memory(RELEASED, PLAN, (Degrees.same(3),))


def test_the_memory_table_of_the_document_is_what_is_counted(memory) -> None:
    columns, weights = (
        (FOUR, EIGHT, DEFAULTS[SMALL], DEFAULTS[LARGE]),
        {p.name: p.shard_bytes for p in memory.parts},
    )
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


def test_the_placement_is_split_where_the_instance_has_the_cores(memory) -> None:
    def shared(tp: Degrees) -> str:
        return f"{memory.core_bytes(tp) / 1e9:.2f} of 25.8 GB on the first of {tp.each[-1]} cores"

    for small in (FOUR, DEFAULTS[SMALL]):
        assert placement(memory, small, SMALL) == (
            "shared",
            f"{shared(small)}. NEFFs and scratch come on top.",
        )
    for large, counts in ((EIGHT, "8 + 8 + 8"), (DEFAULTS[LARGE], "8 + 8 + 1")):
        thinker = memory.stage_bytes(large)["thinker"] / 1e9
        assert placement(memory, large, LARGE) == (
            "split",
            f"{thinker:.2f} of 25.8 GB on the first core of the thinker, the fullest of {counts} "
            f"cores; shared: {shared(large)}. NEFFs and scratch come on top.",
        )
    assert placement(memory, DEFAULTS[LARGE], SMALL) == (
        None,
        "It has 4 logical cores at LNC 2, and TP "
        "thinker=8,talker=8,predictor=1,vocoder=1,encoders=8 needs 8.",
    )


def test_what_does_not_fit_is_told_what_the_instance_allows() -> None:
    """The large one has more cores; the small one neither these nor another placement."""
    full = core_memory(RELEASED, replace(PLAN, max_concurrency=32), (FOUR,))
    assert placement(full, FOUR, LARGE)[0] == "split"
    reason = (
        "28.92 of 25.8 GB a core with placement shared, and there are no cores to split the stages "
        "over. Change one or more of: fewer slots or a shorter context length (the state of 32 "
        "slots is 10.53 GB)."
    )
    assert placement(full, FOUR, SMALL) == (None, reason)
    lines = list(plan_lines(plan_report(RELEASED, full, {SMALL: FOUR}), full))
    assert lines[:2] == [f"{SMALL}, TP 4: does not fit. {reason}", ""]
    assert lines[2].startswith(f"tree for {SMALL}: 73.6 GB of weights on disk, ")


def test_a_plan_is_judged_on_the_instance_or_the_smallest_with_the_cores() -> None:
    for instance, tp, lnc, found in (
        (None, TWO, 2, SMALL),
        (None, FOUR, 2, SMALL),
        (None, EIGHT, 2, LARGE),
        (None, EIGHT, 1, SMALL),
        (None, DEFAULTS[SMALL], 2, SMALL),
        (None, DEFAULTS[LARGE], 2, LARGE),
        (SMALL, EIGHT, 2, SMALL),
        ("trn2u.48xlarge", FOUR, 2, "trn2u.48xlarge"),
    ):
        assert instances_of(replace(PLAN, tp=tp, lnc=lnc), instance) == {found: tp}


def test_a_dry_run_says_what_fits_the_memory_and_the_graphs(tmp_path, capsys) -> None:
    folder = write_leaner_checkpoint(tmp_path)
    words = ["compile", "--model", str(folder), "--dry-run", "--instance", SMALL, "--tp", "4"]
    words += ["--buckets", "64"]
    words += ["--decode-buckets", "64", "--context-length", "64", "--max-concurrency", "1"]
    words += ["--patch-buckets", "64", "--audio-windows", "1", "--chunk-frames", "1"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{SMALL}, TP 4: fits, shared. 0.0")
    assert all(f"| {part} |" in printed for part in PARTS)
    assert "\n| state of thinker |" in printed
    assert printed.splitlines()[-1] == (
        "12 graphs: audio_encoder[windows=1], vision_encoder[patches=64], "
        "thinker_prefill[rows=64,window=64], thinker_flush[window=64], "
        "thinker_decode[slots=1,window=64], text_projection[rows=512], "
        "hidden_projection[rows=512], talker_prefill[rows=64,window=4096], "
        "talker_flush[window=4096], talker_decode[slots=1,window=4096], "
        "code_predictor[slots=1,top_k=50], code2wav[streams=1,frames=1]."
    )


def test_a_released_checkpoint_is_judged_from_its_hub_id(capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    words = ["compile", "--model", "Qwen/Qwen3-Omni-30B-A3B-Captioner", "--dry-run", "--tp", "4"]
    words += ["--target", "neuron"]
    started_s = time.process_time()
    assert cli.main(words) == 0
    assert time.process_time() - started_s < 5
    printed = capsys.readouterr().out
    assert printed.startswith(f"{SMALL}, TP 4: fits, shared. ")
    assert "31.7 B parameters" in printed
    assert "code2wav" not in printed
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (verdict,) = report["instances"]
    assert (verdict["instance"], verdict["tp"], verdict["placement"]) == (SMALL, 4, "shared")
    assert f"4: fits, shared. {verdict['reason']}\n" in printed
    size = f"{verdict['tree_bytes'] / 1e9:.1f} GB of weights on disk"
    count = f"{len(report['graphs'])} graphs to compile"
    assert f"\ntree for {SMALL}: {size}, NEFFs on top; {count}\n" in printed
    assert cli.main(["compile", "--model", "any", "--out", "tree", "--json"]) == 1
    assert "--json needs --dry-run" in capsys.readouterr().err
