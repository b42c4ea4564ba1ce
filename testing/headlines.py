"""The figures that a benchmark's output ends with and its report opens with: three where it speaks.

TTFT  p50 8.31 ms, p95 9.12 ms of 16 | dtype auto, AMD EPYC 7B13, 2 threads
TTFB  p50 10.8 ms, p95 12.4 ms of 16 | dtype auto, AMD EPYC 7B13, 2 threads
RTF   p50 0.118, p95 0.131 of 16; below 1 it plays without a wait | dtype auto, ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PLAYS = "below 1 it plays without a wait"
MS_BELOW_S = 1.0


@dataclass(frozen=True)
class Headline:
    """One figure.

    unit: "s", "%" (of a share: 0.5 is 50 %), or any other, which is written as it is; "" for a
    ratio. p50, p95: of `count` values; None without one. anchor: what it is held against, a goal or
    the figure of a peer; "" for nothing.
    """

    name: str
    unit: str
    p50: float | None
    p95: float | None
    count: int
    anchor: str


def headline(
    name: str, values: Sequence[float | None], unit: str = "", anchor: str = ""
) -> Headline:
    """Return the headline of values, without those that are None."""
    there = [value for value in values if value is not None]
    if not there:
        return Headline(name, unit, None, None, 0, anchor)
    p50, p95 = (float(value) for value in np.percentile(there, (50, 95)))
    return Headline(name, unit, p50, p95, len(there), anchor)


def of_percentiles(
    name: str, found: Mapping[str, float] | None, count: int, unit: str = "", anchor: str = ""
) -> Headline:
    """Return the headline of a row that keeps no values, but their p50 and p95."""
    if found is None:
        return Headline(name, unit, None, None, 0, anchor)
    return Headline(name, unit, found["p50"], found["p95"], count, anchor)


def of_speech(
    rows: Sequence[Mapping[str, Any]], anchors: Mapping[str, str] | None = None
) -> list[Headline]:
    """Return TTFT, TTFB and RTF of replies: rows with ttft_s, ttfb_s, rtf, each maybe None.

    anchors: by name. The RTF of a reply that a limit cut counts, too.
    """
    said = {"RTF": PLAYS, **(anchors or {})}
    named = {"TTFT": ("ttft_s", "s"), "TTFB": ("ttfb_s", "s"), "RTF": ("rtf", "")}
    return [
        headline(name, [row.get(field) for row in rows], unit, said.get(name, ""))
        for name, (field, unit) in named.items()
    ]


def lines(
    headlines: Sequence[Headline], settings: Mapping[str, Any], machine: Mapping[str, Any]
) -> list[str]:
    """Return a line for each headline, with the dtype and the machine.

    settings, machine: as in a result file.
    """
    dtype = settings.get("dtype")
    dtypes = ", ".join(map(str, dtype)) if isinstance(dtype, list | tuple) else dtype
    where = [f"dtype {dtypes}"] if dtypes else []
    where += [str(machine.get("cpu")), f"{machine.get('threads')} threads"]
    width = max((len(one.name) for one in headlines), default=0)
    return [f"{one.name:{width}}  {said(one)} | {', '.join(where)}" for one in headlines]


def said(one: Headline) -> str:
    """Return the values of a headline and its anchor, as text."""
    if one.p50 is None or one.p95 is None:
        values = "not measured: no value"
    elif one.count == 1:
        values = quantity(one.p50, one.unit)
    else:
        p50, p95 = quantity(one.p50, one.unit), quantity(one.p95, one.unit)
        values = f"p50 {p50}, p95 {p95} of {one.count}"
    return f"{values}; {one.anchor}" if one.anchor else values


def quantity(value: float, unit: str) -> str:
    """Return a value with three digits and its unit: seconds below one as ms."""
    if unit == "s" and abs(value) < MS_BELOW_S:
        value, unit = 1e3 * value, "ms"
    elif unit == "%":
        value *= 100
    digits = np.format_float_positional(value, precision=3, fractional=False, trim="-")
    return f"{digits} {unit}".rstrip()
