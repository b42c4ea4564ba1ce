"""The report of result files: what it shows, what it explains, and what it refuses."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench import report
from testing import report_cases as made


class Page(HTMLParser):
    """Tags with their attributes, rows of tables as lists of texts, and all text."""

    def __init__(self, out: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed((out / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags[-1][0] in ("th", "td") and data.strip():
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))

    @property
    def images(self) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == "img"]


def page_of(folder: Path, *contents: Any) -> Page:
    """Write result files and their report, and return its page."""
    files = [made.write(folder, f"{n}.json", content) for n, content in enumerate(contents)]
    assert report.main([*map(str, files), "--out", str(folder / "out")]) == 0
    return Page(folder / "out")


def with_sound(folder: Path, **samples: int) -> dict[str, Any]:
    """Return a result whose first request has its audio in a folder beside the file."""
    content = made.requests([0.06, 0.08, 0.10], save_audio="elsewhere/wavs")
    content["rows"][0]["audio_file"] = "sky.wav"
    made.write_sound(folder / "wavs" / "sky.wav", **samples)
    return content


def test_a_measured_result_has_every_plot_in_one_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, with_sound(tmp_path))
    names = ("timeline", "ttfb", "latency", "rtf", "spectrogram")
    files = [(tmp_path / "out" / f"{name}-a.png").read_bytes() for name in names]
    sources = [str(image["src"]).partition(",") for image in page.images]
    assert [base64.b64decode(data) for _, _, data in sources] == files
    assert {head for head, _, _ in sources} == {"data:image/png;base64"}
    assert "Not drawn" not in page.text and "REPLAY" not in page.text
    assert "python -m bench.ttfb_rtf --seed 0" in page.text
    assert "A: p50 0.08 s, p95 0.098 s" in page.text
    assert "Dashed: TTFT 0.03 s. Solid: TTFB 0.06 s. Triangles: chunks of 1, 2, 4" in page.text
    assert ["all.ttfb_s.p50", "0.08"] in page.rows
    assert ["versions.machine.cpu", "Made-up CPU"] in page.rows
    # Nothing is loaded from elsewhere.
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", re.sub(r'"data:[^"]*"', "", html))


def test_two_results_stand_side_by_side_with_ratios(tmp_path: Path) -> None:
    first = made.requests([0.08, 0.08])
    second = made.requests([0.1, 0.1], concurrency=4, speaker="Ethan", save_audio="elsewhere")
    first["summary"] |= {"verdict": "pass", "failed": 0}
    second["summary"] |= {"verdict": "fail", "failed": 1}
    second["versions"] = second["versions"] | {"torch": "2.9.0"}
    page = page_of(tmp_path, first, second)
    header = page.rows.index(["", "A: 0.json", "B: 1.json", "B / A"])
    assert sorted(page.rows[header - 3 : header]) == [
        ["settings.concurrency", "1", "4"],
        ["settings.speaker", "-", "Ethan"],
        ["versions.torch", "2.13.0", "2.9.0"],
    ]
    for row in (
        ["all.ttfb_s.p50", "0.08", "0.1", "1.25"],
        ["requests", "2", "2", "1"],
        ["verdict", "pass", "fail", "-"],
        ["failed", "0", "1", "-"],
    ):
        assert row in page.rows[header:]
    assert "A, concurrency 1, speaker -: p50 0.08 s" in page.text
    assert "TTFB by configuration: A, B" in page.text


def test_files_of_other_benchmarks_have_no_ratios(tmp_path: Path) -> None:
    contents = [made.results([], {"wer": 0.1}, benchmark=name) for name in ("asr", "asr2")]
    page = page_of(tmp_path, *contents)
    assert ["wer", "0.1"] in page.rows and "B / A" not in page.text
    assert not page.images and page.text.count("no row to plot") == 2


def test_a_replay_is_labelled_and_shares_no_plot_with_a_measurement(tmp_path: Path) -> None:
    replayed = made.requests([0.2, 0.3], label="replay")
    page = page_of(tmp_path, made.requests([0.1, 0.2]), made.replay(), replayed)
    measured, replays = [], []
    for image in page.images:
        title = str(image["alt"])
        letters = re.sub(r"^.*: | \(.*", "", title).split(", ")
        (replays if "REPLAY" in title else measured).extend(letters)
    assert (set(measured), set(replays)) == ({"A"}, {"B", "C"})
    assert "Summary of ttfb_rtf, without mean, p90, p99 (REPLAY, not measured)" in page.text
    assert "B: 1.json (REPLAY, not measured)" in page.text
    assert "B, made-up, ours, split, 8 at a time: p50 0.8 s, p95 1.6 s" in page.text
    assert "C / A" not in page.text


def test_text_of_a_file_is_no_markup_and_no_formula(tmp_path: Path) -> None:
    odd = '<script>alert("x")</script> $\\odd$'
    content = made.requests([0.1], **{odd: odd})
    content["rows"][0]["conversation"] = content["rows"][0]["timeline"][0]["stage"] = odd
    content["summary"][odd] = content["versions"][odd] = content["benchmark"] = odd
    content["command"] = [odd]
    page = page_of(tmp_path, content, made.requests([0.1]), content | {"benchmark": "ttfb_rtf"})
    assert "script" not in {tag for tag, _ in page.tags}
    for row in ([odd, odd], [f"settings.{odd}", odd, "-", odd], ["A: 0.json", odd, odd]):
        assert row in page.rows
    assert f"({odd})" in page.text and f"Summary of {odd}" in page.text


@pytest.mark.parametrize(
    ("sound", "reason"),
    [
        (None, "no request with speech has audio_file. Run the benchmark with --save-audio"),
        ("lost", "wavs/sky.wav can't be read"),
        ("other", "has 1000 samples, the request 12885"),
    ],
)
def test_what_is_missing_is_explained(tmp_path: Path, sound: str | None, reason: str) -> None:
    content = with_sound(tmp_path, samples=1000) if sound else made.requests([0.1])
    if sound == "lost":
        (tmp_path / "wavs" / "sky.wav").unlink()
    del content["rows"][0]["timeline"]
    page = page_of(tmp_path, content)
    assert "Not drawn: no request with speech has timeline. Run the benchmark with" in page.text
    assert reason in page.text
    assert len(page.images) == 3


def test_requests_that_failed_or_did_not_speak(tmp_path: Path) -> None:
    silent = made.request(1, 0.1, ttfb_s=None, rtf=None, audio_s=0.0, chunks=[])
    failed = {"request": 2, "conversation": "sky", "seed": 2, "error": "BusyError"}
    page = page_of(tmp_path, made.results([silent, failed], {}))
    (image,) = page.images
    assert str(image["alt"]).startswith("Distributions")
    assert "also truncated ones: 1." in page.text and "Not drawn: no row has rtf" in page.text


def test_chunk_boundaries_of_the_spectrogram(tmp_path: Path) -> None:
    """Chunks of 1365, 3840 and 7680 samples meet after 1365 and 5205 samples of 24 kHz."""
    file = made.write(tmp_path, "a.json", with_sound(tmp_path))
    report.spectrogram(report.load_sources([file]), figure := Figure())
    axes, *_ = figure.axes
    (lines,) = axes.collections
    times_s = [path.vertices[0, 0] for path in lines.get_paths()]
    np.testing.assert_allclose(times_s, [1365 / 24000, 5205 / 24000])
    (image,) = axes.images
    power = image.get_array()[::-1]  # specgram draws from the top
    assert (power.argmax(axis=0) == 3000 * 256 // 24000).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "can't be read"),
        ({"rows": []}, 'no "schema"'),
        (made.results([made.request(0, 0.1, ttfb_s="0.1")], {}), "rows[0].ttfb_s is '0.1', no v"),
        (made.results([made.request(0, 0.1, total_s=float("nan"))], {}), "total_s is nan, no v"),
        (made.results([made.request(0, 0.1, truncated=None)], {}), "truncated is None, no valid"),
        (made.results([made.request(0, 0.1, frames=True)], {}), "frames is True, no valid int"),
        (made.results([made.request(0, 0.1, chunks=[3])], {}), "rows[0].chunks[0] is a int"),
        (made.results([made.request(0, 0.1, timeline=[{}])], {}), "rows[0].timeline[0].stage is"),
        (made.results([{"ttfb_p50_s": "x"}], {}), "rows[0].concurrency is None, no valid int"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, words: str
) -> None:
    file = made.write(tmp_path, "odd.json", content)
    assert report.main([str(file), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("report.py: ") and str(file) in error and words in error
    assert not (tmp_path / "out").exists()
