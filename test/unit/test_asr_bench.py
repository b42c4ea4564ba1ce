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
BASIC = asr._normalizer("basic", None)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "wer", "cer"),
    [
        ("the cat sat", "the cat sat", 0, 0),
        ("THE CAT SAT", "The cat sat.", 0, 0),
        ("it is twenty one, mister", "It's 21, Mr.", 0, 0),
        ("the cat sat", "the bat sat", 1 / 3, 1 / 11),
        ("the cat sat", "the cat", 1 / 3, 4 / 11),
        ("the cat", "the cat sat", 1 / 2, 4 / 7),
        ("the cat sat", "", 1, 1),
    ],
)
def test_rates_are_errors_over_what_was_said(
    reference: str, hypothesis: str, wer: float, cer: float
) -> None:
    rates = asr.error_rates([reference], [hypothesis], ENGLISH)
    assert (rates["wer"], rates["cer"]) == (pytest.approx(wer), pytest.approx(cer))


def test_the_rate_is_of_the_whole_set_and_not_the_mean_of_its_clips() -> None:
    rates = asr.error_rates(["one more word to say", "yes"], ["one more word to say", "no"], BASIC)
    assert rates["wer"] == pytest.approx(1 / 6)
    assert [rates[k] for k in ("words", "substitutions", "deletions", "insertions")] == [6, 1, 0, 0]


def test_what_is_heard_in_silence_is_inserted() -> None:
    rates = asr.error_rates(["", "hello there"], ["Hm, who?", "hello there"], BASIC)
    assert (rates["wer"], rates["insertions"]) == (1, 2)


def test_there_is_no_rate_of_no_words() -> None:
    assert asr.error_rates([], [], ENGLISH) == {"wer": None, "cer": None, "words": 0}
    assert asr.error_rates(["Um."], ["hello"], ENGLISH)["wer"] is None


def test_basic_leaves_numbers_and_accents_and_drops_case_and_punctuation() -> None:
    assert BASIC("Élan, vital: TWENTY!").split() == ["élan", "vital", "twenty"]


def test_spelling_comes_from_a_whisper_checkpoint(tmp_path: Path) -> None:
    mapping = tmp_path / "normalizer.json"
    mapping.write_text('{"colour": "color"}')
    normalize = asr._normalizer("english", mapping)
    assert asr.error_rates(["The colour"], ["the color"], normalize)["wer"] == 0
    assert asr.error_rates(["The colour"], ["the color"], ENGLISH)["wer"] == 0.5
    with pytest.raises(InputError, match=r"is no normalizer\.json"):
        asr._normalizer("english", tmp_path / "missing.json")


def test_a_manifest_is_json_lines_with_paths_beside_it(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    lines = ['{"audio": "a/b.wav", "text": "One\u2028two."}', "", '{"audio": "/c.wav", "text": ""}']
    manifest.write_text("\n".join(lines), encoding="utf-8")
    assert read_clips(manifest) == [
        Clip(tmp_path / "a" / "b.wav", "One\u2028two."),
        Clip(Path("/c.wav"), ""),
    ]


def test_a_librispeech_folder_is_read_in_order(tmp_path: Path) -> None:
    for chapter in ("12/7", "12/30"):
        folder = tmp_path / chapter
        folder.mkdir(parents=True)
        stem = chapter.replace("/", "-")
        (folder / f"{stem}.trans.txt").write_text(f"{stem}-0000 HELLO THERE\n{stem}-0001 YES\n")
    clips = read_clips(tmp_path)
    assert [clip.audio.name for clip in clips] == [
        *("12-30-0000.flac", "12-30-0001.flac", "12-7-0000.flac", "12-7-0001.flac")
    ]
    assert clips[0] == Clip(tmp_path / "12" / "30" / "12-30-0000.flac", "HELLO THERE")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n \n", "is empty"),
        ('{"audio": "a.wav", "text": "x"}\n{"audio": "b.wav"}', "m.jsonl:2 is not"),
        ('["a.wav", "x"]', "m.jsonl:1 is not"),
        ('{"audio": 3, "text": "x"}', "m.jsonl:1 is not"),
        ("a.wav\tx", "m.jsonl:1 is not"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(
    tmp_path: Path, content: str, said: str
) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(content)
    with pytest.raises(InputError, match=said):
        read_clips(manifest)


def test_a_source_without_clips_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_clips(tmp_path / "missing.jsonl")
    assert asr.main([str(tmp_path), "--model", "m"]) == 1
    assert f"{tmp_path} has no clips in" in capsys.readouterr().err
    (tmp_path / "1" / "2").mkdir(parents=True)
    (tmp_path / "1" / "2" / "1-2.trans.txt").write_text("1-2-0000\n")
    with pytest.raises(InputError, match="no name and words"):
        read_clips(tmp_path)
    with pytest.raises(SystemExit):
        asr.main([str(tmp_path), "--model", "m", "--limit", "0"])


def test_the_figures_count_failures_apart(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
