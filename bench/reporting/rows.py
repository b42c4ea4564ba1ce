"""Rows of result files as dataclasses, with every value checked.

Requests are the rows of ttfb_rtf.py; cases are rows that stand for many requests, such as those of
a replay. Other fields of a row are left alone.
"""

import math
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from bench.common.metrics import ChunkArrival, RequestMetrics
from bench.common.results import ResultsError


@dataclass(frozen=True)
class Chunk:
    """An audio chunk: its arrival since the request's, and its place in the audio."""

    arrival_s: float
    first_sample: int
    samples: int
    frames: int


@dataclass(frozen=True)
class Call:
    """An engine call, in seconds since the request's arrival. slots: the slots in the call."""

    stage: str
    start_s: float
    end_s: float
    slots: list


@dataclass(frozen=True)
class Request(RequestMetrics):
    """A request that was answered. timeline: the engine calls for it, if they were noted."""

    request: int
    conversation: str
    audio_file: str | None
    chunks: tuple[Chunk, ...]
    timeline: tuple[Call, ...]

    @property
    def arrivals(self) -> tuple[list[ChunkArrival], float]:
        """The chunks and their sample rate, for metrics.playing."""
        chunks = [ChunkArrival(c.arrival_s, c.samples, c.frames) for c in self.chunks]
        return chunks, sum(chunk.samples for chunk in chunks) / self.audio_s


@dataclass(frozen=True)
class Case:
    """Many requests, already summed up. profile: source of the stage times."""

    profile: str | None
    driven: str | None
    placement: str | None
    concurrency: int
    requests: int
    ttfb_p50_s: float
    ttfb_p95_s: float
    rtf_mean: float


def parsed(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a type hint's type, dicts as dataclasses, and lists as tuples.

    A missing list is an empty tuple; an int is a count. Raises ResultsError for a value of another
    type, a number that is not finite, or a count below 0.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise ResultsError(f"{where} is a {type(value).__name__}, not a dict.")
        hints = get_type_hints(kind)
        return kind(**{n: parsed(hint, value.get(n), f"{where}.{n}") for n, hint in hints.items()})
    kinds = get_args(kind) or (kind,)
    if value is None and NoneType in kinds:
        return None
    if get_origin(kind) is tuple:
        entries = parsed(list, [] if value is None else value, where)
        return tuple(parsed(kinds[0], one, f"{where}[{i}]") for i, one in enumerate(entries))
    is_valid = type(value) is kinds[0] or (type(value) is int and kinds[0] is float)
    if is_valid and kinds[0] in (int, float):
        is_valid = math.isfinite(value) and (kinds[0] is float or value >= 0)
    if not is_valid:
        raise ResultsError(f"{where} is {value!r}, no valid {kinds[0].__name__}.")
    return value
