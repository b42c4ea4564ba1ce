"""bench/asr.py: its arithmetic, what it reads, and what it refuses."""

import json
from pathlib import Path

import pytest

from bench import asr
from bench.common.manifests import Clip, read_clips
from testing.command_line import InputError
from testing.media_cases import QUESTION_WAV
from testing.results import load_results

ENGLISH = asr._normalizer("english", None)


def test_rates_are_errors_over_what_was_said() -> None:
    for reference, hypothesis, wer, cer in (
        ("the cat sat", "the cat sat", 0, 0),
        ("THE CAT SAT", "The cat sat.", 0, 0),
        ("it is twenty one, mister", "It's 21, Mr.", 0, 0),
        ("the cat sat", "the bat sat", 1 / 3, 1 / 11),
        ("the cat sat", "the cat", 1 / 3, 4 / 11),
        ("the cat", "the cat sat", 1 / 2, 4 / 7),
        ("the cat sat", "", 1, 1),
    ):
        rates = asr.error_rates([reference], [hypothesis], ENGLISH)
        assert (rates["wer"], rates["cer"]) == (pytest.approx(wer), pytest.approx(cer))


def test_spelling_comes_from_a_whisper_checkpoint(tmp_path) -> None:
    mapping = tmp_path / "normalizer.json"
    mapping.write_text('{"colour": "color"}')
    normalize = asr._normalizer("english", mapping)
    assert asr.error_rates(["The colour"], ["the color"], normalize)["wer"] == 0
    assert asr.error_rates(["The colour"], ["the color"], ENGLISH)["wer"] == 0.5
    with pytest.raises(InputError, match=r"is no normalizer\.json"):
        asr._normalizer("english", tmp_path / "missing.json")


def test_a_manifest_is_json_lines_with_paths_beside_it(tmp_path) -> None:
    manifest = tmp_path / "m.jsonl"
    lines = ['{"audio": "a/b.wav", "text": "One\u2028two."}', "", '{"audio": "/c.wav", "text": ""}']
    manifest.write_text("\n".join(lines), encoding="utf-8")
    assert read_clips(manifest) == [
        Clip(tmp_path / "a" / "b.wav", "One\u2028two."),
        Clip(Path("/c.wav"), ""),
    ]


def test_the_figures_count_failures_apart(checkpoint, tmp_path, capsys) -> None:
    audio = [str(QUESTION_WAV), "missing.wav", str(QUESTION_WAV), "beyond-the-limit.wav"]
    manifest, result = tmp_path / "m.jsonl", tmp_path / "r.json"
    lines = [json.dumps({"audio": a, "text": "What is the time?"}) for a in audio]
    manifest.write_text("\n".join(lines))
    model = ["--model", str(checkpoint), "--dtype", "float32", "--concurrency", "2"]
    more = ["--limit", "3", "--max-new-tokens", "4", "--json", str(result)]
    assert asr.main([str(manifest), *model, *more]) == 0
    found = load_results(result)
    figures, rows = found.summary, found.rows
    said = capsys.readouterr().out.splitlines()
    assert f"words: {figures['words']}" in said
    assert [line.split()[0] for line in said[-3:]] == ["WER", "TTFT", "RTF"]
    assert (figures["clips"], figures["failed"], figures["words"]) == (3, 1, 8)
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "missing.wav does not exist" in rows[1]["error"]
    assert (rows[0]["audio"], rows[0]["words"]) == (str(QUESTION_WAV), "What is the time?")
    assert figures["wer"] > 0 and figures["cer"] > 0
    assert figures["rtf"] == pytest.approx(figures["wall_s"] / figures["audio_s"])
    for times in (figures["ttft_s"], figures["total_s"], figures["clip_rtf"]):
        assert 0 < times["p50"] <= times["p90"] <= times["p95"] <= times["p99"]
    assert found.settings["max_new_tokens"] == 4
