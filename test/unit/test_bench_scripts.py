"""The measuring scripts, run small over the tiny checkpoint; what they read and what they write."""

import importlib
import json
import re
from argparse import Namespace
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import bench
from bench import (
    bandwidth,
    end_of_speech,
    long_speech,
    products,
    stages,
    thinker_ttft,
    ttfb_rtf,
    vs_transformers,
    word_times,
)
from bench import threads as bench_threads
from bench.common.manifests import SHIPPED, read_conversations
from bench.common.models import written_messages
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.cpu.eager import EagerCode2Wav
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.verification.oracle import Reference
from testing import report_cases
from testing.call_cost import (
    CHUNK,
    RELEASED_CODE2WAV,
    CallSeconds,
    Work,
    released_limits,
    work_of,
)
from testing.command_line import InputError
from testing.headlines import headline, lines, of_speech
from testing.imports import ROOT
from testing.media_cases import QUESTION_WAV
from testing.memory import live_tensor_bytes
from testing.peak_memory import peak_tensor_bytes
from testing.prompts import prompt_of
from testing.rates import MachineRates
from testing.released import RELEASED
from testing.repeats import again
from testing.results import Results, ResultsError, load_results, publish
from testing.timed_engines import Script, Sizes, Times, timed_engines
from testing.virtual_clock import VirtualClock

SKY = {"id": "sky", "messages": [{"role": "user", "content": "What colour is the sky?"}]}
HEARD = [{"type": "audio", "audio": str(QUESTION_WAV)}]
SPOKEN = {"id": "spoken", "messages": [{"role": "user", "content": HEARD}]}
LONG = {"id": "long", "messages": [{"role": "user", "content": "word " * 5000}]}
needs_library = pytest.mark.skipif(
    find_library() is None, reason="the C was not compiled, and these are the bytes that it reads"
)
FEW = ["--thinker-max-new-tokens", "4", "--talker-max-new-tokens", "7"]  # 6 frames


@pytest.fixture
def model(checkpoint: Path) -> list[str]:
    return ["--model", str(checkpoint), "--dtype", "float32"]


def manifest_of(folder: Path, *entries: Any) -> Path:
    manifest = folder / "m.jsonl"
    manifest.write_text("\n".join(json.dumps(entry) for entry in entries))
    return manifest


def run(script: Any, arguments: list[str], folder: Path) -> Results:
    """Run a script's main; the result file that it wrote."""
    file = folder / "result.json"
    assert not script.main([*arguments, "--json", str(file)])
    results = load_results(file)
    assert results.benchmark == script.__name__.removeprefix("bench.")
    assert results.command == ["python", "-m", script.__name__, *arguments, "--json", str(file)]
    assert results.versions.keys() >= {"python", "torch", "transformers", "qwen3-omni-neuron"}
    assert results.versions["machine"]["memory_mb"] > 0
    assert all(one.count for one in results.headlines)
    return results


SCRIPTS = [f"bench.{file.stem}" for file in sorted(Path(bench.__path__[0]).glob("*.py"))]
SCRIPTS += [f"test.hostile.{name}" for name in ("attack", "fleet_soak", "serve_soak")]
SCRIPTS += ["testing.hlo_table"]
PAGES = (str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
DOCUMENTS = sorted(["BENCHMARK.md", "README.md", "Makefile", *PAGES])


def test_every_script_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """All in this process; `python -m bench.NAME --help` calls the same function."""
    assert "bench.ttfb_rtf" in SCRIPTS
    for name in SCRIPTS:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(["--help"])
        assert ended.value.code == 0, name
        assert "usage: " in capsys.readouterr().out, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_names_scripts_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:bench|test\.hostile)\.[a-z_]+)\b(?!\.)", text))
    named |= {f"bench.{name}" for name in re.findall(r"\bbench/(\w+)\.py", text)}
    assert named
    assert named <= set(SCRIPTS)


# What they read


def test_the_manifest_that_ships_is_read_and_its_sounds_are_there() -> None:
    found = read_conversations(SHIPPED)
    assert len({conversation.name for conversation in found}) == len(found) >= 8
    contents = [m["content"] for c in found for m in c.messages]
    items = [item for content in contents if isinstance(content, list) for item in content]
    sounds = [Path(item["audio"]) for item in items if item["type"] == "audio"]
    assert sounds
    assert all(sound.is_file() for sound in sounds)
    assert any(m["role"] == "system" for c in found for m in c.messages)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([], "an object of id and messages"),
        ({**SKY, "id": "b", "speaker": "Ethan"}, "an object of id and messages"),
        (SKY, "an earlier line has the id 'sky'"),
        ({**SKY, "id": "a/b"}, "a word without a slash"),
        ({"id": "b", "messages": []}, "the conversation is empty"),
        ({"id": "b", "messages": [{"role": "robot", "content": ""}]}, "has role 'robot'"),
        (
            {"id": "b", "messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            r"messages\[0\].content\[0\] is audio without a path",
        ),
        (
            {"id": "b", "messages": [{"role": "user", "content": [{**HEARD[0], "audio": "no"}]}]},
            r"messages\[0\].content\[0\]: .*no does not exist",
        ),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, second: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"m\.jsonl:2 is not .*{said}"):
        read_conversations(manifest_of(tmp_path, SKY, second))


def test_scripts_refuse_what_they_cannot_measure(
    tmp_path: Path, model: list[str], omni: Qwen3Omni, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ttfb_rtf.main([str(tmp_path / "missing.jsonl"), *model]) == 1
    assert "missing.jsonl can't be read" in capsys.readouterr().err
    assert long_speech.main(["--frames", "109", *model]) == 1
    assert "--frames is 110 or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--chunk is one of 1, 4 for this model, got 2"):
        long_speech.check_chunk(2, (1, 4))
    with pytest.raises(ValueError, match="2 tokens is wanted, and the shortest conversation has"):
        written_messages(omni.prompt_builder, 2)


def test_prompts_leave_room_for_the_steps_after_them() -> None:
    prompt = prompt_of(torch.arange(20))
    clock, script = VirtualClock(), Script(lambda prompt: [], 0)
    rows = len(prompt.talker)
    for context_length, repeats, fits in ((rows + 4, 3, True), (rows + 4, 4, False)):
        engines = timed_engines(clock, Times(), script, Sizes(context_length=context_length))
        if fits:
            stages.check_room(engines, [prompt], repeats)
        else:
            with pytest.raises(ValueError, match=f"{rows} rows and 5 steps do not fit"):
                stages.check_room(engines, [prompt], repeats)


# What they write


def test_a_result_file_is_read_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"machine": {"cpu": "EPYC", "threads": 2}}
    rows = [{"ttft_s": 0.008, "ttfb_s": 1.5, "rtf": 0.5}, {"ttft_s": 0.01, "ttfb_s": None}]
    summary = {"n": 1, "of": {"p50": 0.12344, "none": None}}
    settings = {"dtype": "mixed"}
    results = Results("b", ["c"], versions, settings, rows, summary, of_speech(rows))
    publish(results, tmp_path / "r.json")
    assert load_results(tmp_path / "r.json") == results
    assert capsys.readouterr().out.splitlines() == [
        "n: 1",
        "of.p50: 0.1234",
        "",
        "TTFT  p50 9 ms, p95 9.9 ms of 2 | dtype mixed, EPYC, 2 threads",
        "TTFB  1.5 s | dtype mixed, EPYC, 2 threads",
        "RTF   0.5; below 1 it plays without a wait | dtype mixed, EPYC, 2 threads",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_headline_without_a_value_says_so() -> None:
    assert lines([headline("WER", [None], "%")], {}, {"cpu": "EPYC", "threads": 2}) == [
        "WER  not measured: no value | EPYC, 2 threads"
    ]
    assert lines([headline("WER", [0.0156], "%")], {}, {"cpu": "EPYC", "threads": 2}) == [
        "WER  1.56 % | EPYC, 2 threads"
    ]


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    results = Results("b", ["c"], {}, {}, [], {})
    publish(results, tmp_path / "r.json")
    with pytest.raises(TypeError):
        publish(replace(results, summary={"no JSON": object()}), tmp_path / "r.json")
    assert load_results(tmp_path / "r.json") == results
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


WHOLE: dict[str, Any] = {"schema": 1, "benchmark": "b", "command": [], "versions": {}}
WHOLE |= {"settings": {}, "rows": [], "summary": {}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "can't be read"),
        ("[]", "is no result of a benchmark"),
        (json.dumps({"ours_s": [1]}), "is no result of a benchmark"),
        (json.dumps({**WHOLE, "schema": 2}), "has schema 2, and 1 is read here"),
        (json.dumps({k: v for k, v in WHOLE.items() if k != "rows"}), "has no rows"),
        (json.dumps({**WHOLE, "more": 1}), "has more, which no result has"),
        (json.dumps({**WHOLE, "summary": []}), "summary is a list, not a dict"),
        (json.dumps({**WHOLE, "headlines": [{"name": "RTF"}]}), "headlines has something else"),
        (json.dumps({**WHOLE, "rows": [{}, 3]}), r"rows\[1\] is a int, not a dict"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(ResultsError, match=said):
        load_results(file)


# ttfb_rtf


@pytest.mark.release
def test_a_row_is_reproduced_by_its_seed_whatever_fails_beside_it(
    tmp_path: Path, model: list[str]
) -> None:
    manifest = str(manifest_of(tmp_path, SPOKEN, LONG))
    more = ["--requests", "3", "--seed", "5", "--warm-up", "1"]
    found = run(ttfb_rtf, [manifest, *model, *FEW, *more], tmp_path)
    first, failed, third = found.rows
    assert "Shorten the conversation" in failed["error"]
    assert "ttfb_s" not in failed
    assert (found.summary["failed_requests"], found.summary["requests"]) == (1, 2)
    manifest = str(manifest_of(tmp_path, SPOKEN))
    more = ["--seed", str(third["seed"]), "--warm-up", "0"]
    (again,) = run(ttfb_rtf, [manifest, *model, *FEW, *more], tmp_path).rows
    assert (again["text"], again["codes_sha256"]) == (third["text"], third["codes_sha256"])
    assert (first["seed"], third["seed"]) == (5, 7)
    assert first["codes_sha256"] != third["codes_sha256"]


def test_a_row_has_the_figures_the_chunks_and_the_timeline(
    tmp_path: Path, model: list[str]
) -> None:
    manifest = str(manifest_of(tmp_path, SPOKEN, SKY))
    wavs = tmp_path / "wavs"
    more = ["--concurrency", "2", "--requests", "3", "--timeline", "2", "--chunk-frames", "1,2"]
    arguments = [manifest, *model, *FEW, *more, "--save-audio", str(wavs)]
    found = run(ttfb_rtf, arguments, tmp_path)
    assert [row["conversation"] for row in found.rows] == ["spoken", "sky", "spoken"]
    assert [row["seed"] for row in found.rows] == [0, 1, 2]
    for row in found.rows:
        assert row["error"] is None
        # The first text may come after the first sound: random tokens are pieces of letters.
        assert 0 < row["preprocessing_s"] < min(row["ttft_s"], row["ttfb_s"])
        assert max(row["ttft_s"], row["ttfb_s"]) < row["total_s"]
        assert row["rtf"] == pytest.approx(row["chunks"][-1]["arrival_s"] / row["audio_s"])
        assert row["ttfb_s"] == row["chunks"][0]["arrival_s"]
        assert [chunk["frames"] for chunk in row["chunks"]] == [1, 2, 2, 1]
        assert [c["first_sample"] for c in row["chunks"]] == [0, 1365, 5205, 9045]
        audio, rate = soundfile.read(wavs / row["audio_file"])
        assert (rate, len(audio)) == (24000, 6 * 1920 - 555)
        assert row["truncated"] is True
        assert row["frames"] == 6
    assert ["timeline" in row for row in found.rows] == [True, True, False]
    for row in found.rows[:2]:
        names = [span["stage"] for span in row["timeline"]]
        assert names[0] == "preprocessing"
        assert (names.count("code predictor"), names.count("code2wav")) == (6, 4)
        assert names.count("thinker prefill") == names.count("talker prefill") == 1
        ends = [span["end_s"] for span in row["timeline"]]
        starts = [span["start_s"] for span in row["timeline"]]
        assert starts == sorted(starts)
        assert all(0 <= s <= e <= row["total_s"] for s, e in zip(starts, ends, strict=True))
        prefill = row["timeline"][names.index("thinker prefill")]
        assert row["preprocessing_s"] <= prefill["start_s"]
        assert prefill["end_s"] <= row["ttft_s"]
    summary = found.summary
    made = report_cases.requests([0.5])
    assert made["rows"][0].keys() <= found.rows[0].keys(), "the report's cases are of this form"
    for part in ("all", "complete", "truncated"):
        assert made["summary"][part].keys() == summary[part].keys()
    assert made["summary"]["all"]["ttfb_s"].keys() == summary["all"]["ttfb_s"].keys()
    assert (summary["requests"], summary["truncated_requests"]) == (3, 3)
    assert summary["complete"]["rtf"] is None
    assert summary["truncated"]["rtf"]["count"] == summary["all"]["ttfb_s"]["count"] == 3
    assert summary["audio_s"] == pytest.approx(3 * (6 * 1920 - 555) / 24000)


# The others


def test_the_thinker_is_timed_by_prompt_length(omni: Qwen3Omni) -> None:
    options = Namespace(text_tokens=3, repeats=2, seed=4)
    rows = [row for length in (24, 50) for row in thinker_ttft.rows_of(omni, length, options)]
    assert [(row["length"], row["seed"]) for row in rows] == [(24, 4), (24, 5), (50, 4), (50, 5)]
    for row in rows:
        assert row["length"] - 4 < row["prompt_tokens"] <= row["length"]
        assert row["text_tokens"] == 3
        assert row["itl_s"] == pytest.approx((row["total_s"] - row["ttft_s"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(1 / row["itl_s"])
    summary = thinker_ttft.summary_of(rows[2:])
    assert summary["ttft_s"]["count"] == 2
    assert summary["ttft_s"]["mean"] == pytest.approx((rows[2]["ttft_s"] + rows[3]["ttft_s"]) / 2)
    assert summary["prompt_tokens"] == rows[2]["prompt_tokens"]


@pytest.mark.release
def test_every_stage_is_timed_in_every_size(tmp_path: Path, model: list[str]) -> None:
    sizes = ["--prompts", "20,40", "--batches", "1,2", "--chunk-frames", "1,4"]
    more = ["--audio-seconds", "1", "--pictures", "4", "--repeats", "1"]
    rows = run(stages, [*model, *sizes, *more], tmp_path).rows
    cases = [tuple(row[k] for k in ("stage", "batch", "rows", "frames", "patches")) for row in rows]
    assert len(set(cases)) == len(cases)
    counts = {stage: sum(case[0] == stage for case in cases) for stage, *_ in cases}
    assert counts == {
        **{"audio encoder": 1, "vision encoder": 1},
        **{"thinker prefill": 2, "thinker decode": 4},
        **{"talker prepare": 2, "talker prefill": 2, "talker step": 4, "code predictor": 2},
        **{"code2wav start": 4, "code2wav step": 4},
    }
    for row in rows:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["repeats"] == 1


@needs_library
@pytest.mark.usefixtures("use_kind")  # the usual kernels are taken again
def test_both_forms_of_a_matrix_are_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [len(shapes) for shapes in products.shapes_of().values()] == [5 * 4, 2 * (2 + 8 * 2)]
    monkeypatch.setattr(products, "shapes_of", lambda: {"some": [(64, 256), (32, 512)]})
    few = ["--rows", "1,3", "--threads", "1,2", "--repeats", "2", "--kernels", "plain"]
    found = run(products, few, tmp_path)
    cases = [(row["kernels"], row["threads"], row["rows"]) for row in found.rows]
    assert cases == [("plain", threads, rows) for threads in (1, 2) for rows in (1, 3)]
    for row in found.rows:
        assert row["compact_bytes"] / row["plain_bytes"] == pytest.approx(0.758, abs=5e-4)
        assert row["min_ratio"] == row["compact_min_s"] / row["plain_min_s"]
    assert len(found.summary) == 4


@needs_library
@pytest.mark.release
def test_parts_are_compared_with_the_machine(tmp_path: Path, checkpoint: Path) -> None:
    sizes = ["--frames", "1,2", "--audio-seconds", "1,9", "--pictures", "4", "--threads", "1,2"]
    sizes += ["--prompts", "3,20"]
    small = ["--array-mb", "1", "--product-size", "64", "--repeats", "1"]
    found = run(bench_threads, ["--model", str(checkpoint), *sizes, *small], tmp_path)
    cases = [(row["part"], row["size"], row["threads"]) for row in found.rows]
    parts = [("code2wav", 1), ("code2wav", 2)]
    parts += [(f"audio encoder {dtype}", s) for dtype in ("mixed", "int8") for s in (1, 9)]
    parts += [(f"vision encoder {dtype}", 16) for dtype in ("mixed", "int8")]
    prompts = [f"thinker prefill {dtype}" for dtype in ("mixed", "int8", "int4")]
    parts += [(part, rows) for part in prompts for rows in (3, 20)]
    assert cases == [(*part, threads) for part in parts for threads in (1, 2)]
    for row in found.rows:
        assert row["ratio"] <= row["product_ratio"] > 0
        assert row["ratio"] == row["min_s"] / row["limit_s"]
    first, second = found.rows[0]["multiply_adds"], found.rows[2]["multiply_adds"]
    assert first < second < 2.5 * first, "a frame more costs what a frame costs, but its attention"
    counted = {(r["size"], r["multiply_adds"]) for r in found.rows if r["part"] in prompts}
    assert len(counted) == 2, "of two sizes; a dtype changes no product"
    assert len(found.summary) == len(parts)


@pytest.mark.release
def test_stages_are_compared_with_the_machine(tmp_path: Path, checkpoint: Path) -> None:
    named = ("mixed", "int8")
    dtypes = [word for dtype in named for word in ("--dtype", dtype)]
    dtypes += ["--threads", "2", "--prompts", "20,40"]
    small = ["--array-mb", "1", "--product-size", "64", "--repeats", "2"]
    found = run(bandwidth, ["--model", str(checkpoint), *dtypes, *small], tmp_path)
    machine = [row for row in found.rows if row["dtype"] is None]
    names = ("triad", "read", "product")
    cases = [(threads, name) for _ in named for threads in (1, 2) for name in names]
    assert [(row["threads"], row["stage"]) for row in machine] == cases
    assert [row["bytes"] for row in machine[:2]] == [3 * 2**20, 2**20]
    assert machine[2]["multiply_adds"] == 64**3
    counts = {"thinker prefill": 2, "thinker decode": 2, "talker step": 1, "code predictor": 1}
    best = {
        (name, threads): max(
            (row["bytes"] or row["multiply_adds"]) / row["min_s"]
            for row in machine
            if (row["stage"], row["threads"]) == (name, threads)
        )
        for threads, name in cases
    }
    for dtype in named:
        rows = [row for row in found.rows if row["dtype"] == dtype]
        assert {name: sum(r["stage"] == name for r in rows) for name in counts} == counts
        for row in rows:
            assert 0 < row["weight_bytes"] < row["bytes"]
            assert row["fits_l3"] in (True, None)
            least_s = row["bytes"] / best["read", 2], row["multiply_adds"] / best["product", 2]
            ratios = [row["min_s"] / seconds for seconds in least_s]
            assert [row["read_ratio"], row["product_ratio"]] == pytest.approx(ratios)
        assert found.summary[f"{dtype}, 2 threads"].keys() >= {"thinker decode 21"}
    read = {row["dtype"]: row["bytes"] for row in found.rows if row["stage"] == "code predictor"}
    assert read["int8"] == read["mixed"], "of int8, too, it is in mixed by default"
    first, second = (
        found.summary[f"{dtype}, 2 threads"]["code predictor"] for dtype in ("mixed", "int8")
    )
    gain = pytest.approx(first["min_s"] / second["min_s"])
    assert second["times_faster_than_mixed"] == gain


def test_a_reply_is_the_sum_of_its_calls() -> None:
    calls = CallSeconds(prefill=2.0, token=0.1, talker=0.01, predictor=0.02, code2wav=0.5)
    assert calls.reply(tokens=30, frames=120) == pytest.approx(2.0 + 3.0 + 120 * 0.03 + 10 * 0.5)
    assert calls.rtf == pytest.approx((2.0 + 50 * 0.1 + 200 * 0.03 + 200 / 12 * 0.5) / 16)


@needs_library
def test_the_least_time_follows_from_the_rates_of_a_machine() -> None:
    """The rates of two machines. The default code predictor reads more."""
    for measured, added_up in (
        (MachineRates(23.8e9, 88.9e9, 2), 1.72),
        (MachineRates(28.7e9, 180.9e9, 2), 1.22),
    ):
        same = released_limits(measured, {"int4": "int4"})["int4"]
        assert same.rtf == pytest.approx(added_up, abs=0.01)
        default = released_limits(measured, {"int4": "mixed"})["int4"]
        assert default.predictor - same.predictor == pytest.approx(
            0.50e9 / measured.bytes_per_s, rel=0.02
        )


# Bytes of a number in 12 bits: of 256 inputs of 32 outputs, with a head of 128 bytes.
COMPACT = Fraction(256 * 32 * 3 // 2 + 4 * 32, 256 * 32)


@needs_library
def test_the_work_of_a_call_is_that_of_the_released_sizes() -> None:
    models, _ = lay_out(RELEASED, ("thinker",))
    assert models.thinker is not None
    thinker, text = models.thinker, RELEASED.thinker.text
    attention, expert = 2048 * (40 + 32) * 128, 3 * 768 * 2048
    router, head, norms = 128 * 2048, 152064 * 2048, 2 * 2048 + 36 * 128

    def bytes_of(
        each: Fraction | int, scales: int, router_each: Fraction | int = COMPACT
    ) -> Fraction | int:
        layer = (attention + 8 * expert) * each + router * router_each + 4 * (norms + scales)
        return 48 * layer + head * each + 4 * 2048

    row = work_of("thinker", thinker, text, "mixed", 1, before=99)
    values, pair = attention + router + 8 * expert, 2 * 32 * 128
    assert row == Work(
        weight_bytes=int(bytes_of(COMPACT, scales=0)),
        distinct_bytes=int(bytes_of(COMPACT, scales=0)),
        kv_bytes=48 * 2 * 4 * 128 * 100 * 4,
        multiply_adds=48 * (values + pair * 100) + head,
    )
    # 100 rows can have chosen all 128 experts, 10 rows 80 of them.
    few, many = (work_of("thinker", thinker, text, "mixed", rows) for rows in (10, 100))
    assert few.weight_bytes == row.weight_bytes + 48 * 72 * expert * COMPACT
    assert many.weight_bytes == row.weight_bytes + 48 * 120 * expert * COMPACT
    assert many.multiply_adds == 48 * (100 * values + pair * 100 * 101 // 2) + head
    scales = 40 * 128 + 2048 + 8 * (2 * 768 + 2048)
    int8 = work_of("thinker", thinker, text, "int8", 1)
    assert int8.weight_bytes == bytes_of(1, scales) + 4 * 152064
    int4 = work_of("thinker", thinker, text, "int4", 1)
    # The head stays int8. A group of 32 numbers takes 16 bytes, and its scale 2.
    in_groups = 48 * (attention + 8 * expert) * 18 // 32
    others = 48 * (router * COMPACT + 4 * norms) + 4 * 2048
    assert int4.weight_bytes == in_groups + others + head + 4 * 152064


@needs_library
def test_a_frame_reads_the_code_predictor_fifteen_times() -> None:
    models, _ = lay_out(RELEASED, ("talker",))
    assert models.code_predictor is not None and RELEASED.talker is not None
    c, predictor = RELEASED.talker.predictor, models.code_predictor
    frame, int8 = (
        work_of("code_predictor", predictor, c, dtype, 16, passes=15) for dtype in ("mixed", "int8")
    )
    layer = 1024 * (32 + 16) * 128 + 3 * 1024 * 3072
    norms = 5 * (2 * 1024 + 24 * 128) + 1024
    heads = 15 * 2048 * 1024
    assert frame.weight_bytes == 15 * (5 * layer * COMPACT + norms * 4) + heads * COMPACT
    assert frame.distinct_bytes == (5 * layer + heads) * COMPACT + norms * 4
    scales, down = 5 * (32 * 128 + 1024 + 2 * 3072) * 4, 1024 * 3072  # down stays bfloat16
    layers = 5 * (layer - down + down * COMPACT) + scales + norms * 4
    assert int8.weight_bytes == 15 * layers + heads + 15 * 2048 * 4
    assert frame.multiply_adds == 16 * 5 * layer + heads + 5 * 2 * 16 * 128 * (16 * 17 // 2)


@pytest.mark.release
def test_the_end_of_speech_is_timed_in_each_turn(tmp_path: Path) -> None:
    more = ["--seconds", "9", "--piece-ms", "200", "--turns", "1,3", "--others", "0,1"]
    found = run(end_of_speech, [*more, "--rounds", "1", "--speed", "20"], tmp_path)
    cases = [(r["reuse"], r["others"], r["turn"], r["piece_ms"]) for r in found.rows]
    modes = (("on", 200), ("off", None))
    assert cases == [(m, n, turn, ms) for m, ms in modes for n in (0, 1) for turn in (1, 3)]
    for row in found.rows:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["prompt_rows"] > 9 * 13 * (1 if row["turn"] == 1 else 2)
        assert (row["reused_rows"] > 0) == (row["reuse"] == "on")
    first, third = (row for row in found.rows if row["reuse"] == "on" and not row["others"])
    assert third["reused_rows"] > first["prompt_rows"], "what was said before, at least"


@pytest.mark.release
def test_the_end_of_speech_is_timed_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_of_speech, "MOST_ROWS", 60)
    more = ["--seconds", "2", "--piece-ms", "200", "--turns", "1,2", "--others", "0"]
    more += ["--retained", "1.0,0.8", "--rounds", "1", "--speed", "20"]
    found = [r for r in run(end_of_speech, more, tmp_path).rows if r["reuse"] == "on"]
    assert [(r["retained"], r["turn"]) for r in found] == [
        (retained, turn) for retained in (None, 1.0, 0.8) for turn in (1, 2)
    ]
    rows = [r["prompt_rows"] for r in found]
    assert rows[0] == rows[2] == rows[4] < rows[1]
    assert rows[3] == rows[5] == rows[0], "the first turn was dropped"


@pytest.mark.release
def test_the_end_of_speech_is_replayed_below_its_goals(tmp_path: Path) -> None:
    """All but the last window is held: 170 ms on shared cores, 150 on cores of their own."""
    found = run(end_of_speech, ["--replay", "port-167,expected", "--others", "0"], tmp_path)
    assert all(row["kind"] == "replay" for row in found.rows)
    seconds = {(r["profile"], r["placement"], r["held_rows"]): r["max_s"] for r in found.rows}
    held = 1294 - end_of_speech.OPEN_ROWS
    assert seconds["port-167", "shared", held] < 0.170
    assert seconds["port-167", "split", held] < 0.150
    assert seconds["port-167", "shared", 0] > 0.7
    assert seconds["expected", "shared", held] < seconds["expected", "shared", 0]


@pytest.mark.release
def test_long_speech_is_timed_by_its_place(tmp_path: Path, model: list[str]) -> None:
    found = run(long_speech, [*model, "--frames", "130", "--chunk", "2"], tmp_path)
    places = [(row["part"], row["from_frame"], row["to_frame"]) for row in found.rows]
    parts = ("code2wav", "talker and code predictor")
    assert places == [(part, *ends) for part in parts for ends in ((10, 110), (30, 130))]
    assert found.summary["code2wav_time_a_frame_does_not_grow"] == "not measured"
    assert found.summary["code2wav_memory_stays_flat"] == "not measured"
    assert found.summary["talker_frames"] == 130


def test_the_verdicts_compare_late_frames_with_early_ones() -> None:
    def row(end: int, seconds: float, peak_mb: float) -> dict[str, Any]:
        return {"part": "code2wav", "to_frame": end, "median_frame_s": seconds, "peak_mb": peak_mb}

    talker = {"part": "talker and code predictor", "to_frame": 110, "median_frame_s": 1.0}
    early, settled = row(110, 1.0, 50), row(256, 9.0, 100)
    names = ("code2wav_time_a_frame_does_not_grow", "code2wav_memory_stays_flat")
    for late, here, expected in (
        (row(3100, 1.15, 104), True, ["pass", "pass"]),
        (row(3100, 1.16, 104.5), True, ["fail", "fail"]),
        (row(2048, 1.0, 100), True, ["not measured", "pass"]),
        (row(3100, 1.0, 500), False, ["pass", "not measured"]),
    ):
        summary = long_speech.summary_of([early, settled, late, talker], here)
        assert [summary[name] for name in names] == expected


def test_a_stream_of_sound_leaves_nothing_behind(models: Models, config: OmniConfig) -> None:
    """State that grows, and a call whose tensors need more and more."""
    assert models.code2wav is not None
    vocoder = CpuVocoder(EagerCode2Wav(models.code2wav), slots=1)
    frames = long_speech.decoded_chunks(vocoder, config, chunk=1, seed=0)
    held, needed, shapes = [], [], []
    for number in range(100):
        if number in (60, 99):
            shapes.append([tensor.shape for tensor in vocoder._states[0]])
            held.append(live_tensor_bytes())
            needed.append(peak_tensor_bytes(next(frames)))
        else:
            next(frames)()
    assert shapes[0] == shapes[1]
    assert held[0] == held[1]
    assert needed[0] == needed[1] > 0


def test_the_peak_of_a_call_is_what_it_has_at_a_time() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return torch.cat((second, torch.empty(250)))  # 500 + 250 + 750 at once, as many as before

    assert peak_tensor_bytes(call) == 6000
    assert peak_tensor_bytes(lambda: torch.empty(3).numpy()) == 12


def test_the_work_of_the_released_code2wav_is_counted() -> None:
    adds, weight_bytes = bench_threads.code2wav_work(RELEASED, CHUNK)
    assert (RELEASED_CODE2WAV.multiply_adds, RELEASED_CODE2WAV.weight_bytes) == (adds, weight_bytes)


@pytest.fixture
def little() -> Namespace:
    return Namespace(text_tokens=3, frames=4, rounds=1, dtype="auto", reference_dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", again("bfloat16")])
def test_transformers_is_compared(checkpoint: Path, little: Namespace, dtype: str) -> None:
    little.reference_dtype = dtype
    rows = vs_transformers.compare(checkpoint, "spoken", little)
    assert [row["side"] for row in rows] == [*["ours"] * 3, "transformers"]
    for row in rows:
        assert row["frames"] == 4
        assert row["audio_s"] == pytest.approx((4 * 1920 - 555) / 24000)
        assert row["rtf"] > 0
    assert rows[3]["ttfb_s"] == rows[3]["total_s"]
    found = vs_transformers.ratios(rows)
    ours = sorted(row["ttfb_s"] for row in rows[:3])[1]
    assert found["ttfb_ratio"] == pytest.approx(rows[3]["total_s"] / ours)
    assert found["rtf_ratio"] == pytest.approx(rows[3]["rtf"] / found["ours"]["rtf"])


def test_nothing_is_timed_where_the_replies_differ(
    omni: Qwen3Omni, reference: Reference, little: Namespace
) -> None:
    messages = vs_transformers.PROMPTS["written"]
    ours = omni.generate_audio(messages, **vs_transformers.settings(little))
    theirs = vs_transformers.answer(reference, omni.prompt_builder, messages, little, 4)
    vs_transformers.check_equal(ours, theirs, 3, reference)
    vs_transformers.check_as_long(ours, theirs, 3)
    with pytest.raises(InputError, match=r"are \(3, 4\), of transformers \(3, 3\)"):
        vs_transformers.check_as_long(ours, replace(theirs, codes=theirs.codes[:3]), 3)
    codes = ours.codes.copy()
    codes[2, 7] += 1
    for different, said in (
        (replace(ours, token_ids=[*ours.token_ids[:-1], 1]), "text differs"),
        (replace(ours, codes=codes), "codes differ"),
        (replace(ours, audio=ours.audio + np.float32(1e-3)), "audio differs by"),
    ):
        with pytest.raises(AssertionError, match=said):
            vs_transformers.check_equal(different, theirs, 3, reference)


@pytest.mark.parametrize("side", vs_transformers.SIDES)
@pytest.mark.release
def test_memory_is_what_came_on_top(checkpoint: Path, little: Namespace, side: str) -> None:
    found = vs_transformers.memory_here(side, checkpoint, little)
    assert 0 < found["before_mb"] <= found["loaded_mb"] <= found["peak_mb"]
    assert found["grown_mb"] == found["peak_mb"] - found["before_mb"]


# Where words begin


def burst(seconds: float, pause_s: float) -> np.ndarray:
    """Return a tone and the pause after it, float32 at 24 kHz."""
    wave = np.sin(np.arange(round(24000 * seconds)) / 10) / 2
    return np.append(wave, np.zeros(round(24000 * pause_s))).astype(np.float32)


def test_words_are_spread_by_their_bytes() -> None:
    """20 bytes in 3.8 s, of which 2 s and 0.8 s sound, with a pause of 1 s between them."""
    sound = np.concatenate((burst(2.0, 1.0), burst(0.8, 0.0)))
    words = word_times.Words(["one", "twenty", "ß", "zero", "a"], sound, [0.1, None, 2, 3, 3.5])
    starts = np.array([0, 4, 11, 14, 19])  # of 20 bytes
    assert np.allclose(word_times.by_bytes(words), starts * 3.8 / 20)
    assert np.allclose(
        word_times.without_pauses(words), [s * 0.14 + (s > 14) for s in starts], atol=0.1
    )
    assert word_times.entered(words) == [0.0, 0.08, 0.16, 0.24, 0.32]
    assert np.allclose(word_times.nearest_pause(words), [0, 0.76, 2.09, 3, 3.61], atol=0.05)
    assert np.allclose(word_times.errors(word_times.by_bytes, [words]), [-0.1, 0.09, -0.34, 0.11])


def test_pieces_are_joined_with_their_times() -> None:
    first = word_times.Words(["a"], burst(0.5, 0.5), [0.25])
    whole = word_times.joined([first, word_times.Words(["b", "c"], burst(0.5, 0.0), [0.0, None])])
    assert whole.words == ["a", "b", "c"]
    assert whole.onsets_s == [0.25, 1.0, None]
    assert whole.audio_s == 1.5


def test_maps_are_compared_with_the_true_times(tmp_path: Path) -> None:
    found = run(word_times, ["--texts", "5"], tmp_path)
    assert found.summary == {"texts": 5, "left_out": 0}
    rows = {(row["speech"], row["map"]): row for row in found.rows}
    assert len(rows) == len(found.rows) == 8
    said = [row["words"] for (speech, _), row in rows.items() if speech == "talker"]
    assert said == [1 + 2 + 3 + 4 + 6] * 5
    for row in found.rows:
        assert 0 <= row["p50_s"] <= row["p90_s"]
        assert 0 <= row["within"] <= 1
    # A word takes many frames, and the talker got its token long before.
    assert rows["talker", "token"]["within"] < 0.6
