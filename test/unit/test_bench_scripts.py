"""The measuring scripts, run small over the tiny checkpoint; what they read and what they write."""

import importlib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import soundfile

import bench
from bench import (
    end_of_speech,
    long_speech,
    products,
    report,
    stages,
    thinker_ttft,
    ttfb_rtf,
    vs_transformers,
    word_aligner,
    word_times,
)
from bench import threads as bench_threads
from bench.common.manifests import SHIPPED, read_conversations
from qwen3_omni_neuron.cpu.native.installed import find_library
from testing.headlines import of_speech
from testing.imports import ROOT
from testing.media_cases import QUESTION_WAV
from testing.repeats import again
from testing.results import Results, load_results, publish

SKY = {"id": "sky", "messages": [{"role": "user", "content": "What colour is the sky?"}]}
HEARD = [{"type": "audio", "audio": str(QUESTION_WAV)}]
SPOKEN = {"id": "spoken", "messages": [{"role": "user", "content": HEARD}]}
needs_library = pytest.mark.skipif(
    find_library() is None, reason="the C was not compiled, and these are the bytes that it reads"
)
FEW = ["--thinker-max-new-tokens", "4", "--talker-max-new-tokens", "7"]  # 6 frames


@pytest.fixture
def model(checkpoint) -> list[str]:
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
SCRIPTS += [f"test.hostile.{name}" for name in ("attack", "serve_soak")]
SCRIPTS += ["testing.hlo_table"]
PAGES = (str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
DOCUMENTS = sorted(["BENCHMARK.md", "README.md", "Makefile", *PAGES])


def test_every_script_has_its_help(capsys) -> None:
    """All in this process; `python -m bench.NAME --help` calls the same function."""
    assert "bench.ttfb_rtf" in SCRIPTS
    for name in SCRIPTS:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(["--help"])
        assert ended.value.code == 0, name
        assert "usage: " in capsys.readouterr().out, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_names_scripts_that_exist(document) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:bench|test\.hostile)\.[a-z_]+)\b(?!\.)", text))
    named |= {f"bench.{name}" for name in re.findall(r"\bbench/(\w+)\.py", text)}
    assert named
    assert named <= set(SCRIPTS)


def test_the_manifest_that_ships_is_read_and_its_sounds_are_there() -> None:
    found = read_conversations(SHIPPED)
    assert len({conversation.name for conversation in found}) == len(found) >= 8
    contents = [m["content"] for c in found for m in c.messages]
    items = [item for content in contents if isinstance(content, list) for item in content]
    sounds = [Path(item["audio"]) for item in items if item["type"] == "audio"]
    assert sounds
    assert all(sound.is_file() for sound in sounds)
    assert any(m["role"] == "system" for c in found for m in c.messages)


def test_a_result_file_is_read_as_it_was_written(tmp_path, capsys) -> None:
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


def test_a_row_has_the_figures_the_chunks_and_the_timeline(tmp_path, model, capsys) -> None:
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
    assert (summary["requests"], summary["truncated_requests"]) == (3, 3)
    assert summary["complete"]["rtf"] is None
    assert summary["truncated"]["rtf"]["count"] == summary["all"]["ttfb_s"]["count"] == 3
    assert summary["audio_s"] == pytest.approx(3 * (6 * 1920 - 555) / 24000)
    # The page over this file, and over others that are none of a benchmark.
    file, out = tmp_path / "result.json", tmp_path / "report"
    assert report.main([str(file), "--out", str(out)]) == 0
    assert "<img" in (out / "index.html").read_text()
    whole, none = json.loads(file.read_text()), tmp_path / "none"
    capsys.readouterr()
    for change, words in (
        ("not json", "can't be read"),
        ('{"rows": []}', 'no "schema"'),
        *(
            ({"rows": [{**whole["rows"][0], **row}]}, f"{file}: rows[0].{words}")
            for row, words in (
                ({"ttfb_s": "0.1"}, "ttfb_s is '0.1', no valid"),
                ({"total_s": float("nan")}, "total_s is nan, no valid"),
                ({"truncated": None}, "truncated is None, no valid"),
                ({"frames": True}, "frames is True, no valid int"),
                ({"chunks": [3]}, "chunks[0] is a int"),
                ({"timeline": [{}]}, "timeline[0].stage is"),
                ({"ttfb_p50_s": "x"}, "concurrency is None, no valid int"),
            )
        ),
    ):
        file.write_text(change if isinstance(change, str) else json.dumps({**whole, **change}))
        assert report.main([str(file), "--out", str(none)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("report.py: ") and str(file) in error and words in error
        assert not none.exists()


def test_the_thinker_is_timed_by_prompt_length(omni) -> None:
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
def test_every_stage_is_timed_in_every_size(tmp_path, model) -> None:
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
def test_both_forms_of_a_matrix_are_multiplied(tmp_path, monkeypatch) -> None:
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
def test_parts_are_compared_with_the_machine(tmp_path, checkpoint) -> None:
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
def test_the_end_of_speech_is_timed_in_each_turn(tmp_path) -> None:
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
def test_long_speech_is_timed_by_its_place(tmp_path, model) -> None:
    found = run(long_speech, [*model, "--frames", "130", "--chunk", "2"], tmp_path)
    places = [(row["part"], row["from_frame"], row["to_frame"]) for row in found.rows]
    parts = ("code2wav", "talker and code predictor")
    assert places == [(part, *ends) for part in parts for ends in ((10, 110), (30, 130))]
    assert found.summary["code2wav_time_a_frame_does_not_grow"] == "not measured"
    assert found.summary["code2wav_memory_stays_flat"] == "not measured"
    assert found.summary["talker_frames"] == 130


@pytest.fixture
def little() -> Namespace:
    return Namespace(text_tokens=3, frames=4, rounds=1, dtype="auto", reference_dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", again("bfloat16")])
def test_transformers_is_compared(checkpoint, little, dtype) -> None:
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


def test_attention_is_compared_with_the_true_times(tmp_path) -> None:
    rows = run(word_aligner, ["--clips", "64"], tmp_path).rows
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert 0 <= row["p50_s"] <= row["p90_s"]
        # Inner starts are no better than by bytes of text: docs/benchmarks/realtime.md.
        assert row["map"] != "attention" or row["of"] == "inner" or row["p50_s"] < 0.15


def test_maps_are_compared_with_the_true_times(tmp_path) -> None:
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
