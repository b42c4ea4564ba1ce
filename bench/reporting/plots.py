"""Plots over many requests: TTFB by configuration, latency distributions, RTF by concurrency.

What was measured and what was replayed are never in one plot. A request that a token limit cut is
drawn hollow.
"""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from bench.common.metrics import percentile
from bench.reporting.rows import Case, Request
from bench.reporting.sources import REPLAY, Source, configuration
from bench.reporting.style import (
    DASHES,
    INK,
    PAPER,
    QUIET,
    SERIES,
    Dash,
    Picture,
    from_zero,
    headline,
    new_figure,
    plain_grid,
    png_of,
    styled,
)
from bench.reporting.words import scale_of, seconds, significant

HOLLOW = "Filled: the model ended the reply. Hollow: a token limit cut it."
LATENCIES = (("ttft_s", "TTFT"), ("itl_s", "ITL, mean of a request"), ("ttfb_s", "TTFB"))
MARKED = (50, 90, 95)
SHARES = ((0, "0"), (0.25, "25 %"), (0.5, "p50"), (0.75, "75 %"), (0.9, "p90"), (0.95, "p95"))


@dataclass(frozen=True)
class Configuration:
    """A bar of the plot of TTFB. requests: those that were measured; none of a case."""

    name: str
    colour: str
    count: int
    p50_s: float
    p95_s: float
    requests: tuple[Request, ...]


def ttfb_by_configuration(sources: Sequence[Source]) -> Picture | None:
    """None where no file has a TTFB. sources: all measured, or all replayed."""
    bars = configurations(sources)
    if not bars:
        return None
    is_replay = sources[0].is_replay
    with styled():
        figure = new_figure(1.5 + 0.5 * len(bars))
        headline(figure, "TTFB by configuration", _ran_with_dots(sources), is_replay)
        axes = figure.subplots()
        longest_s = max([bar.p95_s for bar in bars] + [_most(bar.requests) for bar in bars])
        scale, unit = scale_of(longest_s)
        for row, bar in enumerate(bars):
            axes.barh(
                row, scale * bar.p50_s, 0.62, color=bar.colour, alpha=0.35, edgecolor=bar.colour,
                hatch="///" if is_replay else None,
            )  # fmt: skip
            axes.plot([scale * bar.p50_s] * 2, [row - 0.31, row + 0.31], color=INK, linewidth=1.8)
            axes.plot([scale * bar.p95_s] * 2, [row - 0.31, row + 0.31], color=INK, linewidth=1.0)
            _draw_requests(axes, row, bar, scale)
            axes.annotate(
                f"p50 {seconds(bar.p50_s)}, p95 {seconds(bar.p95_s)}", (1.0, row),
                xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
                va="center", fontsize=8.5, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(range(len(bars)), [f"{bar.name} ({bar.count})" for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        from_zero(axes, scale * longest_s)
        axes.set_xlabel(f"{unit} from the request's arrival to its first sample")
        plain_grid(axes, "x")
        note = "Thick line: p50, thin line: p95; in brackets, how many requests."
        if any(bar.requests for bar in bars):
            note += f" Dots: requests. {HOLLOW}"
        alt = "; ".join(
            f"{bar.name}: p50 {seconds(bar.p50_s)}, p95 {seconds(bar.p95_s)}, {bar.count} requests"
            for bar in bars
        )
        return Picture(
            _name("ttfb", is_replay),
            _title("TTFB by configuration", is_replay),
            f"{_label(is_replay)}Bars of TTFB from 0. {alt}.",
            note,
            png_of(figure),
        )


def configurations(sources: Sequence[Source]) -> list[Configuration]:
    """One a file of requests, one a case."""
    bars = []
    for number, source in enumerate(sources):
        colour = SERIES[number % len(SERIES)]
        speaking = tuple(r for r in source.requests if r.ttfb_s is not None)
        if speaking:
            times = [r.ttfb_s for r in speaking if r.ttfb_s is not None]
            name = _name_of(source, sources)
            p50_s, p95_s = percentile(times, 50), percentile(times, 95)
            bars.append(Configuration(name, colour, len(times), p50_s, p95_s, speaking))
        for case in source.cases:
            name = f"{source.letter}: {_series_of(case, sources)}, {case.concurrency} at a time"
            bars.append(
                Configuration(name, colour, case.requests, case.ttfb_p50_s, case.ttfb_p95_s, ())
            )
    return bars


def latency_distributions(sources: Sequence[Source]) -> Picture | None:
    """None where no file has requests. sources: all measured, or all replayed."""
    there = [source for source in sources if source.requests]
    if not there:
        return None
    is_replay = there[0].is_replay
    with styled():
        figure = new_figure(4.1)
        headline(figure, "Latency: share of requests that waited no longer", _ran(there), is_replay)
        told = []
        for panel, (field, name) in zip(figure.subplots(1, 3, sharey=True), LATENCIES, strict=True):
            told += _draw_shares(panel, there, field, name)
        if len(there) > 1:
            handles = [
                Line2D([], [], color=SERIES[i % len(SERIES)], linestyle=_dash(i), label=name)
                for i, name in enumerate(_name_of(source, there) for source in there)
            ]
            figure.legend(
                handles=handles, frameon=False, loc="outside lower left", ncols=min(3, len(there))
            )
        count = sum(len(source.requests) for source in there)
        return Picture(
            _name("latency", is_replay),
            _title("Latency distributions", is_replay),
            f"{_label(is_replay)}Shares of requests by TTFT, ITL and TTFB. {' '.join(told)}",
            f"All {count} requests: a token limit can't change what comes before it. Dots are p50, "
            "p90 and p95.",
            png_of(figure),
        )


def rtf_by_concurrency(sources: Sequence[Source]) -> Picture | None:
    """None where no file has an RTF. sources: all measured, or all replayed."""
    series = _rtf_series(sources)
    if not series:
        return None
    is_replay = sources[0].is_replay
    levels = sorted({level for one in series.values() for level, _ in one})
    with styled():
        figure = new_figure(4.2 + 0.11 * len(series))
        headline(figure, "RTF by concurrency", _ran_with_dots(sources), is_replay)
        axes = figure.subplots()
        told = []
        width = 0.84 / len(series)  # series beside each other at each level
        for number, ((name, cut), points) in enumerate(series.items()):
            by_level: dict[int, list[float]] = defaultdict(list)
            for level, value in points:
                by_level[level].append(value)
            centre = width * (number + 0.5) - 0.42
            at = {level: levels.index(level) + centre for level in sorted(by_level)}
            middles = {level: percentile(by_level[level], 50) for level in at}
            colour, dash = SERIES[number % len(SERIES)], _dash(number)
            across, up = list(at.values()), list(middles.values())
            axes.plot(across, up, color=colour, linewidth=1, linestyle=dash)
            for level, place in at.items():
                _draw_level(axes, place, by_level[level], colour, cut, width)
                told.append(
                    f"{name}{', cut by a limit' if cut else ''}, {level} at a time: "
                    f"{significant(middles[level])} ({len(by_level[level])})"
                )
        worst = max(value for points in series.values() for _, value in points)
        _finish_rtf(figure, axes, levels, worst, list(series))
        note = "" if is_replay else f"{HOLLOW} "
        kind = "mean" if is_replay and not any(s.requests for s in sources) else "p50"
        return Picture(
            _name("rtf", is_replay),
            _title("RTF by concurrency", is_replay),
            f"{_label(is_replay)}RTF from 0 by requests at a time; {kind}: {'; '.join(told)}.",
            f"{note}Numbers: {kind}. Below 1, speech is made faster than it is played.",
            png_of(figure),
        )


def _rtf_series(sources: Sequence[Source]) -> dict[tuple[str, bool], list[tuple[int, float]]]:
    """By name and whether a limit cut the replies: (requests at a time, RTF)."""
    series: dict[tuple[str, bool], list[tuple[int, float]]] = defaultdict(list)
    for source in sources:
        # Files that differ in nothing but the concurrency are one series.
        name = configuration(source, sources, without=("concurrency", "requests", "seed"))
        for request in source.requests:
            if request.rtf is not None:
                series[name or "all", request.truncated].append((source.concurrency, request.rtf))
        for case in source.cases:
            series[_series_of(case, sources), False].append((case.concurrency, case.rtf_mean))
    return dict(sorted(series.items()))


def _draw_level(
    axes: Axes, place: float, values: Sequence[float], colour: str, cut: bool, width: float
) -> None:
    """The requests of a series at one level, in the order they came, and the value of their p50."""
    reach = min(0.4 * width, 0.1)
    spread = np.linspace(-0.6 * reach, 0.6 * reach, len(values)) if len(values) > 1 else [0.0]
    face = PAPER if cut else colour
    across = [place + offset for offset in spread]
    axes.plot(across, values, "o", color=colour, markersize=5, markerfacecolor=face)
    middle, several = percentile(values, 50), len(values) > 1
    words = f"p50 {significant(middle)}" if several else significant(middle)
    if several:
        axes.plot([place - reach, place + reach], [middle] * 2, color=INK, linewidth=1.8)
    if several and width > 0.4:
        where: dict[str, Any] = {"xy": (place + reach, middle), "xytext": (4, 0), "va": "center"}
    else:
        where = {"xy": (place, max(values)), "xytext": (0, 6), "ha": "center", "va": "bottom"}
    axes.annotate(
        words, textcoords="offset points", fontsize=7.5 if width < 0.2 else 9, **where,
        path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
    )  # fmt: skip


def _finish_rtf(
    figure: Figure, axes: Axes, levels: Sequence[int], worst: float, names: list[tuple[str, bool]]
) -> None:
    top = max(worst, 1.0) if worst > 0.4 else worst
    from_zero(axes, top, "y", room=1.15)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlim(-0.5, len(levels) - 0.5)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("RTF")
    plain_grid(axes, "y")
    if top >= 1:
        axes.axhline(1, color=QUIET, linewidth=1.0, linestyle="--")
        axes.text(-0.48, 1, "1: as long as it plays", fontsize=8.5, color=QUIET, va="bottom")
    if len({name for name, _ in names}) > 1:
        handles = [
            Line2D(
                [], [], color=SERIES[i % len(SERIES)], linestyle=_dash(i), marker="o",
                markerfacecolor=PAPER if cut else SERIES[i % len(SERIES)],
                label=f"{name}{', cut by a limit' if cut else ''}",
            )
            for i, (name, cut) in enumerate(names)
        ]  # fmt: skip
        figure.legend(handles=handles, frameon=False, loc="outside lower left", ncols=2)


def _draw_requests(axes: Axes, row: int, bar: Configuration, scale: float) -> None:
    """Dots over a bar, spread so that equal ones are all seen."""
    for number, request in enumerate(bar.requests):
        place = row + 0.22 * (2 * (number % 5) / 4 - 1)
        axes.plot(
            scale * (request.ttfb_s or 0.0), place, "o", markersize=4, color=bar.colour,
            markerfacecolor=PAPER if request.truncated else bar.colour,
        )  # fmt: skip


def _draw_shares(axes: Axes, sources: Sequence[Source], field: str, name: str) -> list[str]:
    """A line a file, and what it says in words. Between two requests it goes as percentiles do."""
    longest_s, curves = 0.0, []
    for number, source in enumerate(sources):
        found = [getattr(request, field) for request in source.requests]
        times = sorted(time for time in found if time is not None)
        if times:
            curves.append((number, source, times))
            longest_s = max(longest_s, times[-1])
    scale, unit = scale_of(longest_s)
    told = []
    for number, source, times in curves:
        colour = SERIES[number % len(SERIES)]
        shares = np.linspace(0, 1, len(times)) if len(times) > 1 else np.array([1.0])
        axes.plot(
            scale * np.array(times), shares, color=colour, linestyle=_dash(number), linewidth=1.6
        )
        marks = [percentile(times, rank) for rank in MARKED]
        axes.plot([scale * m for m in marks], [r / 100 for r in MARKED], "o", color=colour, ms=4.5)
        marked = zip(MARKED, marks, strict=True)
        words = ", ".join(f"p{rank} {seconds(mark)}" for rank, mark in marked)
        told.append(f"{source.letter}, {name}: {words}.")
        if len(curves) == 1:
            # One line: what its dots stand for is said in the free corner.
            axes.text(
                0.97, 0.05, words.replace(", ", "\n"), transform=axes.transAxes, ha="right",
                va="bottom", fontsize=9,
            )  # fmt: skip
    axes.set_title(name, fontsize=10)
    axes.set_yticks(*zip(*SHARES, strict=True))
    axes.set_ylim(0, 1.03)
    from_zero(axes, scale * longest_s, room=1.08)
    axes.set_xlabel(unit)
    plain_grid(axes, "y")
    return told


def _name_of(source: Source, beside: Sequence[Source]) -> str:
    """Its letter, its concurrency, and what else sets it apart."""
    words = f"{source.letter}: {source.concurrency} at a time"
    apart = configuration(source, beside, without=("concurrency",))
    return "\n".join([words, *textwrap.wrap(apart, 40)])


def _series_of(case: Case, sources: Sequence[Source]) -> str:
    """With its profile where there are several."""
    profiles = {one.profile for source in sources for one in source.cases}
    return f"{case.profile}, {case.series}" if len(profiles) > 1 else case.series


def _ran(sources: Sequence[Source]) -> str:
    """What ran, where it is the same in all files."""
    ran = {source.what_ran for source in sources}
    return ran.pop() if len(ran) == 1 else "on several machines, or of several models"


def _ran_with_dots(sources: Sequence[Source]) -> str:
    """And what hollow dots are, where there are any."""
    cut = any(request.truncated for source in sources for request in source.requests)
    return f"{_ran(sources)}; hollow: cut by a token limit" if cut else _ran(sources)


def _most(requests: Sequence[Request]) -> float:
    return max((request.ttfb_s or 0.0 for request in requests), default=0.0)


def _dash(number: int) -> Dash:
    return DASHES[number % len(DASHES)]


def _name(name: str, is_replay: bool) -> str:
    return f"{name}-replay" if is_replay else name


def _title(title: str, is_replay: bool) -> str:
    return f"{title} ({REPLAY})" if is_replay else title


def _label(is_replay: bool) -> str:
    return f"{REPLAY}, not measured. " if is_replay else ""
