"""Plots over many requests: TTFB by configuration, latency distributions, RTF by concurrency.

What was measured and what was replayed are never in one plot. A request that a token limit cut is
drawn hollow.
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from bench.reporting.sources import REPLAY, Source, configuration
from bench.reporting.style import (
    GREY,
    INK,
    PAPER,
    Picture,
    new_figure,
    png_of,
    row_axis,
    time_axis,
)
from bench.reporting.words import seconds, significant

HOLLOW = "Filled: the model ended the reply. Hollow: a token limit cut it."
LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL, mean of a request", "ttfb_s": "TTFB"}
MARKED = [0.5, 0.9, 0.95]
SHARES = {0: "0", 0.25: "25 %", 0.5: "p50", 0.75: "75 %", 0.9: "p90", 0.95: "p95"}
COLUMNS = ["file", "letter", "ran", "is_replay", "bar", "case", "series", "level"]
COLUMNS += ["truncated", "rtf", "total_s", "count", "p50_s", "p95_s"]


def pictures_over(sources: Sequence[Source]) -> list[Picture]:
    """Return the plots over all files with data for them; replays have plots of their own."""
    # The field that a row needs for a plot. A plot returns its alternative text and its note.
    plots: dict[str, tuple[str, str, Callable[[pd.DataFrame], tuple[Figure, str, str]]]] = {
        "ttfb": ("TTFB by configuration", "p50_s", ttfb_by_configuration),
        "latency": ("Latency distributions", "total_s", latency_distributions),
        "rtf": ("RTF by concurrency", "rtf", rtf_by_concurrency),
    }
    pictures = []
    replays = ("-replay", f" ({REPLAY})", f"{REPLAY}, not measured. ")
    for suffix, label, warning in (("", "", ""), replays):
        rows = rows_of([source for source in sources if source.is_replay == bool(suffix)])
        for name, (title, field, plot) in plots.items():
            if rows[field].notna().any():
                figure, alt, note = plot(rows.dropna(subset=field))
                named = (name + suffix, title + label, warning + alt)
                pictures.append(Picture(*named, note, png_of(figure)))
    return pictures


def rows_of(sources: Sequence[Source]) -> pd.DataFrame:
    """Return a row for each request or case: its figures, its bar and its series.

    A bar is a file of requests, or a case: their count, and TTFB's p50_s and p95_s. case: -1 for a
    request. level: concurrent requests.
    """
    profiles = {case.profile for source in sources for case in source.cases}
    rows: list[dict[str, Any]] = []
    for file, source in enumerate(sources):
        apart = configuration(source, sources, without=("concurrency",))
        bar = f"{source.letter}: {source.concurrency} at a time\n{textwrap.fill(apart, 40)}".strip()
        times = pd.Series([request.ttfb_s for request in source.requests], dtype=float)
        # Files that differ only in concurrency are one series.
        series = configuration(source, sources, without=("concurrency", "requests", "seed"))
        about = {"file": file, "letter": source.letter, "bar": bar, "series": series or "all"}
        about |= {"case": -1, "level": source.concurrency, "count": times.count()}
        about |= {"p50_s": times.quantile(0.5), "p95_s": times.quantile(0.95)}
        about |= {"ran": source.what_ran, "is_replay": source.is_replay}
        rows += [{**vars(request), **about} for request in source.requests]
        for number, case in enumerate(source.cases):
            named = (case.profile if len(profiles) > 1 else None, case.driven, case.placement)
            series = ", ".join(filter(None, named)) or "all"
            bar = f"{source.letter}: {series}, {case.concurrency} at a time"
            figures = {"count": case.requests, "p50_s": case.ttfb_p50_s, "p95_s": case.ttfb_p95_s}
            figures |= {"rtf": case.rtf_mean, "level": case.concurrency, "truncated": False}
            rows.append({**about, **figures, "bar": bar, "series": series, "case": number})
    return pd.DataFrame(rows, columns=[*COLUMNS, *LATENCIES])


def ttfb_by_configuration(rows: pd.DataFrame) -> tuple[Figure, str, str]:
    """Draw a bar for each file of requests and for each case."""
    bars = rows.groupby(["file", "case"]).first()
    colours = [look_of(file)["color"] for file, _ in bars.index]
    places, hatch = np.arange(len(bars)), "///" if rows.is_replay.any() else None
    figure = _new_figure(1.5 + 0.5 * len(bars), "TTFB by configuration", rows, hollow=True)
    axes = figure.subplots()
    axes.barh(places, bars.p50_s, 0.62, color=colours, edgecolor=colours, alpha=0.35, hatch=hatch)
    axes.vlines(bars.p50_s, places - 0.31, places + 0.31, color=INK, linewidth=1.8)
    axes.vlines(bars.p95_s, places - 0.31, places + 0.31, color=INK, linewidth=1.0)
    spoken = rows.dropna(subset="ttfb_s")
    for key, requests in spoken.groupby(["file", "case"]):
        place = bars.index.get_loc(key)
        # Spread, so that equal values are all visible.
        heights = place + 0.22 * (np.arange(len(requests)) % 5 / 2 - 1)
        faces = np.where(requests.truncated, PAPER, colours[place])
        axes.scatter(requests.ttfb_s, heights, 16, c=faces, edgecolors=colours[place], zorder=3)
    labels = ("p50 " + bars.p50_s.map(seconds) + ", p95 " + bars.p95_s.map(seconds)).tolist()
    names = bars.bar + " (" + bars["count"].astype(str) + ")"
    row_axis(axes, names.tolist(), labels, fontsize=8.5)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    longest_s = np.fmax(bars.p95_s.max(), spoken.ttfb_s.max())
    time_axis(axes, longest_s, "from the request's arrival to its first sample", room=1.05)
    axes.grid(axis="x")
    named = zip(bars.bar, labels, bars["count"], strict=True)
    alt = "; ".join(f"{bar}: {words}, {count} requests" for bar, words, count in named)
    note = "Thick line: p50, thin line: p95; in brackets, how many requests."
    note += f" Dots: requests. {HOLLOW}" if len(spoken) else ""
    return figure, f"Bars of TTFB from 0. {alt}.", note


def latency_distributions(rows: pd.DataFrame) -> tuple[Figure, str, str]:
    """Draw the shares of requests by TTFT, ITL and TTFB."""
    figure = _new_figure(4.1, "Latency: share of requests that waited no longer", rows)
    panels = figure.subplots(1, len(LATENCIES), sharey=True)
    labels = [
        _draw_shares(axes, rows, field) for axes, field in zip(panels, LATENCIES, strict=True)
    ]
    if (files := rows.file.nunique()) > 1:
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles=handles, loc="outside lower left", ncols=min(3, files))
    return (
        figure,
        f"Shares of requests by TTFT, ITL and TTFB. {' '.join(labels)}",
        f"All {len(rows)} requests: a token limit can't change what comes before it. Dots are p50, "
        "p90 and p95.",
    )


def _draw_shares(axes: Axes, rows: pd.DataFrame, field: str) -> str:
    """Draw a line for each file, straight between two requests. Returns the lines in words."""
    labels, marked = [], ""
    for (file, letter, bar), part in rows.groupby(["file", "letter", "bar"]):
        times, look = part[field].dropna().sort_values(), look_of(file)
        shares = np.linspace(0, 1, len(times)) if len(times) > 1 else np.ones(len(times))
        axes.plot(times, shares, label=bar, linewidth=1.6, **look)
        if len(times):
            marks = times.quantile(MARKED)
            axes.plot(marks, MARKED, "o", color=look["color"], markersize=4.5)
            marked = ", ".join(f"p{100 * rank:.0f} {seconds(at_s)}" for rank, at_s in marks.items())
            labels.append(f"{letter}, {LATENCIES[field]}: {marked}.")
    if len(labels) == 1:
        # One line: the free corner says what its dots mean.
        look = {"transform": axes.transAxes, "ha": "right", "va": "bottom", "fontsize": 9}
        axes.text(0.97, 0.05, marked.replace(", ", "\n"), **look)
    axes.set_title(LATENCIES[field])
    axes.set_yticks(list(SHARES), SHARES.values())
    axes.set_ylim(0, 1.03)
    time_axis(axes, rows[field].max() if labels else 0.0, room=1.08)
    axes.grid(axis="y")
    return " ".join(labels)


def rtf_by_concurrency(rows: pd.DataFrame) -> tuple[Figure, str, str]:
    """Draw each request's RTF, and their p50."""
    places = {level: place for place, level in enumerate(sorted(set(rows.level)))}
    series = rows.groupby(["series", "truncated"])
    width = 0.84 / len(series)  # each series has its own place at a level
    figure = _new_figure(4.2 + 0.11 * len(series), "RTF by concurrency", rows, hollow=True)
    axes, labels = figure.subplots(), []
    for number, ((name, cut), part) in enumerate(series):
        look, label = look_of(number), f"{name}, cut by a limit" if cut else name
        face = PAPER if cut else look["color"]
        levels = part.groupby("level").rtf
        across = [places[level] + width * (number + 0.5) - 0.42 for level in levels.groups]
        axes.plot(across, levels.median(), linewidth=1, **look)
        axes.plot([], [], marker="o", markerfacecolor=face, label=label, **look)  # for the legend
        for place, (level, values) in zip(across, levels, strict=True):
            middle = _draw_level(axes, place, values, look["color"], face, width)
            labels.append(f"{label}, {level} at a time: {middle} ({len(values)})")
    top = max(rows.rtf.max(), 1.0) if rows.rtf.max() > 0.4 else rows.rtf.max()
    if top >= 1:
        axes.axhline(1, color=GREY, linewidth=1.0, linestyle="--")
        axes.text(-0.48, 1, "1: as long as it plays", fontsize=8.5, color=GREY, va="bottom")
    axes.set_ylim(0, 1.15 * top or 1.0)
    axes.set_xticks(range(len(places)), [str(level) for level in places])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("RTF")
    axes.grid(axis="y")
    if rows.series.nunique() > 1:
        figure.legend(loc="outside lower left", ncols=2)
    kind = "p50" if (rows.case < 0).any() else "mean"
    note = f"Numbers: {kind}. Below 1, speech is made faster than it is played."
    note = note if rows.is_replay.any() else f"{HOLLOW} {note}"
    return figure, f"RTF from 0 by requests at a time; {kind}: {'; '.join(labels)}.", note


def _draw_level(
    axes: Axes, place: float, values: pd.Series, colour: str, face: str, width: float
) -> str:
    """Draw a series' requests at one level, in order of arrival. Returns their p50."""
    reach, middle, several = min(0.4 * width, 0.1), values.median(), len(values) > 1
    spread = np.linspace(-0.6 * reach, 0.6 * reach, len(values)) if several else np.zeros(1)
    axes.plot(place + spread, values, "o", color=colour, markersize=5, markerfacecolor=face)
    where: dict[str, Any] = {"xy": (place, values.max()), "xytext": (0, 6), "ha": "center"}
    if several:
        axes.hlines(middle, place - reach, place + reach, color=INK, linewidth=1.8, zorder=3)
    if several and width > 0.4:
        where = {"xy": (place + reach, middle), "xytext": (4, 0), "va": "center"}
    words = f"p50 {significant(middle)}" if several else significant(middle)
    where["path_effects"] = [withStroke(linewidth=2.5, foreground=PAPER)]
    size = 7.5 if width < 0.2 else 9
    axes.annotate(words, textcoords="offset points", fontsize=size, **where)
    return significant(middle)


def look_of(number: int) -> dict[str, Any]:
    """Return the colour and the dashes of a file or series."""
    looks = list(matplotlib.rcParams["axes.prop_cycle"])
    return looks[number % len(looks)]


def _new_figure(height_in: float, title: str, rows: pd.DataFrame, hollow: bool = False) -> Figure:
    """Return a figure that says what ran, if all files say the same, and what is hollow."""
    ran = rows.ran.iloc[0]
    ran = ran if rows.ran.nunique() == 1 else "on several machines, or of several models"
    ran += "; hollow: cut by a token limit" if hollow and rows.truncated.any() else ""
    return new_figure(height_in, title, ran, rows.is_replay.any())
