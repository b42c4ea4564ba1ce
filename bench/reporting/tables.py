"""The tables of a report: two result files side by side, figures of each file, and settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd

from bench.common.metrics import BEFORE_ANY_LIMIT
from bench.reporting.sources import REPLAY, WITHOUT_EFFECT, Source, setting_text
from bench.reporting.words import (
    STATISTICS,
    Path,
    is_statistic,
    leaves,
    less_is_better,
    measured_name,
    name_of,
    text_of,
    title_of,
    value_of,
)

MOST_CASES = 60
_LEFT_OUT = ("mean", "p90", "p99")
_HEADLINES = {("all", "ttft_s", "p50"), ("all", "ttfb_s", "p50")}
_HEADLINES |= {("complete", "rtf", "p50"), ("truncated", "rtf", "p50")}


@dataclass(frozen=True)
class Table:
    """Texts with a caption. head: column that names the rows; numbers: right-aligned columns.

    A column's name is a text or a source.
    """

    caption: str
    frame: pd.DataFrame
    head: int | None = 0
    numbers: Sequence[int] = ()


@dataclass(frozen=True)
class Comparison:
    """Two files of one benchmark. differences: table to be read before the rest.

    comparable: False for a replay and a measurement. sentences: the most important figures.
    """

    first: Source
    second: Source
    differences: Table
    comparable: bool
    sentences: list[str]
    figures: Table


def comparisons(sources: Sequence[Source]) -> list[Comparison]:
    """Return a comparison of each benchmark's first file with each of its others."""
    first_of = {source.results.benchmark: source for source in reversed(sources)}
    pairs = combinations(sources, 2)
    return [compare(a, b) for a, b in pairs if a is first_of[b.results.benchmark]]


def compare(first: Source, second: Source) -> Comparison:
    """Compare summaries figure by figure: distributions first, else in the order of the first."""
    comparable = first.is_replay == second.is_replay
    ours, theirs = dict(leaves(first.results.summary)), dict(leaves(second.results.summary))
    rows, sentences = [], []
    for path in sorted({**ours, **theirs}, key=lambda path: path[-1] not in STATISTICS):
        a, b = ours.get(path), theirs.get(path)
        if not _says_something(path, a, b):
            continue
        ratio = f"{b / a:.2f}" if _is_number(a) and _is_number(b) and a else "-"
        title, texts = title_of(path), (text_of(path, a), text_of(path, b))
        verdict = _verdict(path, a, b, first, second) if comparable else "not comparable"
        rows.append((title, *texts, ratio, verdict))
        if path in _HEADLINES and comparable and ratio != "-":
            sentences.append(
                f"{title}: {texts[0]} in {first.letter}, {texts[1]} in {second.letter}, {ratio} "
                "times as much. Less is better."
            )
    columns = ["figure", first, second, f"{second.letter} / {first.letter}", "in words"]
    figures = Table("Figures", pd.DataFrame(rows, columns=columns), numbers=(1, 2, 3))
    return Comparison(first, second, differences(first, second), comparable, sentences, figures)


def _says_something(path: Path, a: Any, b: Any) -> bool:
    """Return False for absent values, extra statistics, equal counts, and repeats of "all"."""
    of_all = path[0] in ("complete", "truncated") and measured_name(path) in BEFORE_ANY_LIMIT
    if path[-1] in _LEFT_OUT or of_all or (a is None and b is None):
        return False
    return path[-1] != "count" or a != b


def _verdict(path: Path, a: Any, b: Any, first: Source, second: Source) -> str:
    if a is None or b is None:
        return f"only {(first if b is None else second).letter} has it"
    if a == b:
        return "the same"
    less = less_is_better(path)
    if less is None or not _is_number(a) or not _is_number(b):
        return "different"
    return f"{(first if (a < b) == less else second).letter} is better"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def differences(first: Source, second: Source) -> Table:
    """Return possible reasons for a difference: measured or not, settings, versions, machine."""
    rows = []
    if first.is_replay != second.is_replay:
        kinds = [REPLAY if source.is_replay else "measured" for source in (first, second)]
        rows.append(("kind", "of the figures", *kinds))
    for kind, ours in first.about.items():
        theirs = second.about[kind]
        for name in sorted((ours.keys() | theirs.keys()) - WITHOUT_EFFECT):
            if ours.get(name) != theirs.get(name):
                texts = (setting_text(ours, name), setting_text(theirs, name))
                rows.append((kind, name.replace("_", " "), *texts))
    frame = pd.DataFrame(rows, columns=["what", "name", first, second])
    return Table("What differs", frame, head=1)


def figures_of(source: Source) -> list[Table]:
    """Return every value in a file's summary, and the rows that are not requests."""
    found = {path: v for path, v in leaves(source.results.summary) if v is not None}
    others = [(title_of(p), text_of(p, v)) for p, v in found.items() if not is_statistic(p)]
    spread = [
        (title_of(path), *(text_of((*path, s), found.get((*path, s))) for s in STATISTICS))
        for path in dict.fromkeys(path[:-1] for path in found if is_statistic(path))
    ]
    rows = [row for row in source.results.rows if "request" not in row]
    shown = rows[:MOST_CASES]
    # A list or a dict does not fit a cell: it is in the file.
    odd = {name for row in shown for name, v in row.items() if isinstance(v, list | dict)}
    names = [n for n in dict.fromkeys(name for row in shown for name in row) if n not in odd]
    cells = [[value_of(name, row.get(name)) for name in names] for row in shown]
    more = f", the first {MOST_CASES} of {len(rows)}" if len(rows) > MOST_CASES else ""
    frames = {
        "Distributions": pd.DataFrame(spread, columns=["figure", *STATISTICS]),
        "Other figures" if spread else "Figures": pd.DataFrame(others, columns=["figure", "value"]),
    }
    tables = [Table(caption, frame, numbers=range(1, 7)) for caption, frame in frames.items()]
    frame = pd.DataFrame(cells, columns=[name_of(name) for name in names])
    tables.append(Table(f"Cases{more}", frame, head=None))
    return [table for table in tables if not table.frame.empty]


def settings_of(sources: Sequence[Source]) -> list[Table]:
    """Return all settings, versions and machines side by side."""
    tables = []
    for kind, caption in (("setting", "Settings"), ("version", "Versions"), ("machine", "Machine")):
        texts = {s: {n: setting_text(s.about[kind], n) for n in s.about[kind]} for s in sources}
        frame = pd.DataFrame(texts).fillna("-").rename(index=name_of)
        tables.append(Table(caption, frame.reset_index(names="name")))
    return tables
