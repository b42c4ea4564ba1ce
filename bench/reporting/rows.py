"""What a report takes from the rows of a result file, with every value looked at once.

Requests are the rows of ttfb_rtf.py; cases are rows that stand for many requests, such as those of
a replay. What else there is in a row is left alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.common.results import ResultsError

_CASE_FIGURES = ("ttfb_p50_s", "ttfb_p95_s")
_SERIES_WORDS = ("driven", "placement")


@dataclass(frozen=True)
class Chunk:
    """An audio chunk: when it came, since the request's arrival, and where it lies in the audio."""

    arrival_s: float
    first_sample: int
    samples: int
    frames: int


@dataclass(frozen=True)
class Call:
    """One call of an engine, in seconds since the request's arrival. slots: how many shared it."""

    stage: str
    start_s: float
    end_s: float
    slots: int


@dataclass(frozen=True)
class Request:
    """One request that was answered; figures as in metrics.py. calls: none without a timeline.

    truncated: a token limit cut its text, its speech or both.
    """

    number: int
    conversation: str
    ttft_s: float | None
    itl_s: float | None
    ttfb_s: float | None
    total_s: float
    audio_s: float
    rtf: float | None
    truncated: bool
    audio_file: str | None
    chunks: tuple[Chunk, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Case:
    """Many requests, already summed up. profile: whose stage times it is made of; series: what
    else it is a case of, but for the concurrency."""

    profile: str
    series: str
    concurrency: int
    requests: int
    ttfb_p50_s: float
    ttfb_p95_s: float
    rtf_mean: float


def requests_of(rows: list[dict[str, Any]], where: str) -> list[Request]:
    """The rows that are requests and were answered. Raises ResultsError, which names the row."""
    return [
        _request(_Fields(row, f"{where}: rows[{index}]"))
        for index, row in enumerate(rows)
        if "request" in row and row.get("error") is None
    ]


def cases_of(rows: list[dict[str, Any]], where: str) -> list[Case]:
    """The rows that are cases. Raises ResultsError, which names the row."""
    return [
        _case(_Fields(row, f"{where}: rows[{index}]"))
        for index, row in enumerate(rows)
        if all(name in row for name in _CASE_FIGURES)
    ]


class _Fields:
    """Values of a row, each of the kind that it is to be, or a ResultsError."""

    def __init__(self, row: Any, where: str):
        if not isinstance(row, Mapping):
            raise ResultsError(f"{where} is a {type(row).__name__}, not a dict.")
        self._row, self._where = row, where

    def number(self, name: str) -> float:
        value = self._row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self._refused(name, value, "a number")

    def perhaps(self, name: str) -> float | None:
        return None if self._row.get(name) is None else self.number(name)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value < 0 or value != int(value):
            raise self._refused(name, value, "a count")
        return int(value)

    def word(self, name: str) -> str:
        value = self._row.get(name)
        if not isinstance(value, str):
            raise self._refused(name, value, "a text")
        return value

    def perhaps_word(self, name: str) -> str | None:
        return None if self._row.get(name) is None else self.word(name)

    def flag(self, name: str) -> bool:
        value = self._row.get(name)
        if not isinstance(value, bool):
            raise self._refused(name, value, "true or false")
        return value

    def length(self, name: str) -> int:
        value = self._row.get(name)
        if not isinstance(value, list):
            raise self._refused(name, value, "a list")
        return len(value)

    def each(self, name: str) -> list["_Fields"]:
        """The entries of a list; none where there is no such list."""
        if self._row.get(name) is None:
            return []
        count = self.length(name)
        return [_Fields(self._row[name][i], f"{self._where}.{name}[{i}]") for i in range(count)]

    def _refused(self, name: str, value: Any, wanted: str) -> ResultsError:
        return ResultsError(f"{self._where}: {name} is {value!r}, not {wanted}.")


def _request(row: _Fields) -> Request:
    return Request(
        number=row.count("request"),
        conversation=row.word("conversation"),
        ttft_s=row.perhaps("ttft_s"),
        itl_s=row.perhaps("itl_s"),
        ttfb_s=row.perhaps("ttfb_s"),
        total_s=row.number("total_s"),
        audio_s=row.number("audio_s"),
        rtf=row.perhaps("rtf"),
        truncated=row.flag("truncated"),
        audio_file=row.perhaps_word("audio_file"),
        chunks=tuple(_chunk(chunk) for chunk in row.each("chunks")),
        calls=tuple(_call(call) for call in row.each("timeline")),
    )


def _chunk(chunk: _Fields) -> Chunk:
    return Chunk(
        chunk.number("arrival_s"),
        chunk.count("first_sample"),
        chunk.count("samples"),
        chunk.count("frames"),
    )


def _call(call: _Fields) -> Call:
    return Call(
        call.word("stage"), call.number("start_s"), call.number("end_s"), call.length("slots")
    )


def _case(row: _Fields) -> Case:
    words = [word for name in _SERIES_WORDS if (word := row.perhaps_word(name)) is not None]
    return Case(
        profile=row.perhaps_word("profile") or "",
        series=", ".join(words) or "all",
        concurrency=row.count("concurrency"),
        requests=row.count("requests"),
        ttfb_p50_s=row.number("ttfb_p50_s"),
        ttfb_p95_s=row.number("ttfb_p95_s"),
        rtf_mean=row.number("rtf_mean"),
    )
