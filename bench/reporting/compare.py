"""Two result files of one benchmark side by side: the figures of their summaries, and ratios."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bench.common.metrics import BEFORE_ANY_LIMIT
from bench.reporting.sources import Difference, Source, differences
from bench.reporting.words import (
    NOTHING,
    STATISTICS,
    Path,
    leaves,
    less_is_better,
    measured_name,
    title_of,
    value_of,
)

_LEFT_OUT = ("mean", "p90", "p99")
_HEADLINES = (
    ("all", "ttft_s", "p50"),
    ("all", "ttfb_s", "p50"),
    ("complete", "rtf", "p50"),
    ("truncated", "rtf", "p50"),
)


@dataclass(frozen=True)
class Line:
    """A figure of both. ratio: the second over the first; None where there is none. verdict: in
    words."""

    name: str
    first: str
    second: str
    ratio: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """differences: to be read before the rest. comparable: not a replay beside a measurement.

    sentences: the figures that matter most, in words.
    """

    first: Source
    second: Source
    differences: list[Difference]
    comparable: bool
    sentences: list[str]
    lines: list[Line]


def comparisons(sources: Sequence[Source]) -> list[Comparison]:
    """The first file of each benchmark beside each other one of it."""
    found = []
    for first, second in combinations(sources, 2):
        alike = [s for s in sources if s.results.benchmark == first.results.benchmark]
        if first is alike[0] and second in alike:
            found.append(compare(first, second))
    return found


def compare(first: Source, second: Source) -> Comparison:
    """Their summaries, figure by figure: distributions first, else in the order of the first."""
    comparable = first.is_replay == second.is_replay
    ours, theirs = dict(leaves(first.results.summary)), dict(leaves(second.results.summary))
    paths = [*ours, *(path for path in theirs if path not in ours)]
    paths.sort(key=lambda path: path[-1] not in STATISTICS)
    lines = [
        _line(path, ours.get(path), theirs.get(path), first, second, comparable)
        for path in paths
        if _says_something(path, ours.get(path), theirs.get(path))
    ]
    said = [_sentence(p, ours.get(p), theirs.get(p), first, second) for p in _HEADLINES]
    sentences = [words for words in said if words and comparable]
    return Comparison(first, second, differences(first, second), comparable, sentences, lines)


def _says_something(path: Path, a: Any, b: Any) -> bool:
    """Not what neither has, a statistic too many, or what stands there for all requests."""
    of_all = path[0] in ("complete", "truncated") and measured_name(path) in BEFORE_ANY_LIMIT
    if path[-1] in _LEFT_OUT or of_all or (a is None and b is None):
        return False
    return path[-1] != "count" or a != b


def _sentence(path: Path, a: Any, b: Any, first: Source, second: Source) -> str | None:
    if not _is_number(a) or not _is_number(b) or not a:
        return None
    name = measured_name(path)
    return (
        f"{title_of(path)}: {value_of(name, a)} in {first.letter}, {value_of(name, b)} in "
        f"{second.letter}, {b / a:.2f} times as much. Less is better."
    )


def _line(path: Path, a: Any, b: Any, first: Source, second: Source, comparable: bool) -> Line:
    name = measured_name(path)
    ratio = b / a if _is_number(a) and _is_number(b) and a else None
    return Line(
        title_of(path),
        value_of(name, a),
        value_of(name, b),
        NOTHING if ratio is None else f"{ratio:.2f}",
        _verdict(path, a, b, first, second) if comparable else "not comparable",
    )


def _verdict(path: Path, a: Any, b: Any, first: Source, second: Source) -> str:
    if a is None or b is None:
        return f"only {(first if b is None else second).letter} has it"
    if not _is_number(a) or not _is_number(b):
        return "the same" if a == b else "different"
    if a == b:
        return "the same"
    less = less_is_better(path)
    if less is None:
        return "different"
    return f"{(first if (a < b) == less else second).letter} is better"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
