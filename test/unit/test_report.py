"""The report of result files: what it shows, what it explains, and what it refuses."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.release
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
