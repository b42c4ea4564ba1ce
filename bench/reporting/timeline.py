"""The timeline of one request: each engine's calls, and what a player has to play."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from bench.common.metrics import playing, silences
from bench.reporting.rows import Chunk, Request
from bench.reporting.sources import Source
from bench.reporting.style import (
    CHUNK_SHADES,
    GREY,
    INK,
    PAPER,
    STAGES,
    Picture,
    new_figure,
    png_of,
    row_axis,
    time_axis,
)
from bench.reporting.words import counted, seconds

SHADE, WAIT, OTHER = "#eef3f9", "#b00020", "#444444"
PAD = 26  # above a panel's title: room for TTFT and TTFB below it


def timeline(source: Source, request: Request) -> Picture:
    """Draw a Gantt chart of a request with calls and a first sample, and one of its beginning."""
    assert request.timeline and request.ttfb_s is not None
    first_s = max(request.ttfb_s, request.ttft_s or 0.0)
    end_s = 1.02 * max(request.total_s, first_s)
    shaded_s = min(1.12 * first_s, end_s)
    lanes = lanes_of(request)
    title = f"One reply, stage by stage: first sample after {seconds(request.ttfb_s)}"
    figure = new_figure(3.58 + 0.48 * len(lanes), title, source.what_ran, source.is_replay)
    whole, beginning = figure.subplots(2, 1)
    ends_s = playing(*request.arrivals)[-1][1]
    plays = f"plays until {seconds(ends_s)}" if ends_s > end_s else ""
    _draw(whole, request, lanes, end_s, [*lanes.took.str.removeprefix("1 call, "), plays])
    whole.set_title(f"All of it: {seconds(request.audio_s)} of speech", pad=PAD)
    whole.axvspan(0, shaded_s, color=SHADE, zorder=0, linewidth=0)
    _draw(beginning, request, lanes, shaded_s, [])
    beginning.set_title("The shaded part of it: to the first sample", pad=PAD)
    beginning.set_facecolor(SHADE)

    waits = "It never waits for samples."
    if request.underruns:
        times = "once" if request.underruns == 1 else f"{request.underruns} times"
        waits = f"It waits {times} for samples, {seconds(request.silent_s)} in all (hatched)."
    calls = "; ".join(lanes.index + " " + lanes.took)
    ttft = "No text" if request.ttft_s is None else f"First text after {seconds(request.ttft_s)}"
    frames = ", ".join(str(chunk.frames) for chunk in request.chunks)
    name = f"request {request.request} ({request.conversation})"
    note = (
        f"R{name[1:]}, the one with a timeline whose TTFB is nearest to the median. Talker "
        "prepare: it reads its prompt while the thinker still works. A triangle is a chunk that "
        f"arrives; the player starts with the first and plays a frame in 80 ms. {waits}"
    )
    if shared := sum(len(call.slots) > 1 for call in request.timeline):
        note += f" {shared} of {len(request.timeline)} calls were shared with other requests."
    return Picture(
        f"timeline-{source.letter.lower()}",
        f"Timeline of one request ({source.title})",
        f"Gantt chart of {name}: {calls}. {ttft} (TTFT), first sample after "
        f"{seconds(request.ttfb_s)} (TTFB). {len(request.chunks)} chunks of {frames} frames; the "
        f"last came after {seconds(request.chunks[-1].arrival_s)} of {seconds(request.audio_s)} of "
        f"speech. {waits}",
        note + " A token limit cut this reply." * request.truncated,
        png_of(figure),
    )


def lanes_of(request: Request) -> pd.DataFrame:
    """Return a row for each stage, in the order in which a request passes them, unknown ones last.

    count: number of its calls; sum: their total time, in seconds; took: both in words.
    """
    calls = pd.DataFrame(map(vars, request.timeline))
    lanes = (calls.end_s - calls.start_s).groupby(calls.stage).agg(["count", "sum"])
    counts = lanes.itertuples(index=False)
    lanes["took"] = [f"{counted(count, 'call')}, {seconds(took_s)}" for count, took_s in counts]
    known = [stage for stage in STAGES if stage in lanes.index]
    return lanes.loc[known + [stage for stage in lanes.index if stage not in STAGES]]


def _draw(
    axes: Axes, request: Request, lanes: pd.DataFrame, end_s: float, beside: list[str]
) -> None:
    """Draw from the arrival to end_s. beside: texts at the right of each lane."""
    for lane, stage in enumerate(lanes.index):
        calls = [(c.start_s, c.end_s - c.start_s) for c in request.timeline if c.stage == stage]
        colour = STAGES.get(stage, OTHER)
        # An edge with its own colour makes a call that is shorter than a pixel visible.
        axes.broken_barh(calls, (lane - 0.38, 0.76), color=colour, linewidth=0.4)
    _draw_player(axes, request, len(lanes), end_s)
    _draw_marks(axes, request)
    row_axis(axes, [*lanes.index, "playback"], beside, fontsize=8, color=GREY)
    axes.set_ylim(len(lanes) + 0.5, -0.6)
    time_axis(axes, end_s, "since the request's arrival")
    axes.grid(axis="x")


def _draw_player(axes: Axes, request: Request, lane: int, end_s: float) -> None:
    draw_chunks(axes, lane, request.chunks, playing(*request.arrivals), end_s)
    for from_s, to_s in silences(*request.arrivals):
        look: Any = {"facecolor": PAPER, "edgecolor": WAIT, "hatch": "xxxx"}
        axes.barh(lane, to_s - from_s, 0.76, left=from_s, **look)
    arrivals = [chunk.arrival_s for chunk in request.chunks if chunk.arrival_s <= end_s]
    axes.plot(arrivals, [lane - 0.42] * len(arrivals), "v", color=INK, markersize=4, clip_on=False)


def draw_chunks(
    axes: Axes,
    lane: float,
    chunks: Sequence[Chunk],
    spans: Sequence[tuple[float, float]],
    end_s: float,
) -> None:
    """Draw a block for each chunk while it plays, with its number of frames if that fits."""
    look: Any = {"ha": "center", "va": "center", "fontsize": 7.5, "color": PAPER}
    for number, (chunk, (start_s, until_s)) in enumerate(zip(chunks, spans, strict=True)):
        shade, shown = CHUNK_SHADES[number % 2], (min(until_s, end_s) - start_s) / end_s
        axes.barh(lane, until_s - start_s, 0.6, left=start_s, color=shade)
        if shown > 0.04:
            words = counted(chunk.frames, "frame") if shown > 0.12 else str(chunk.frames)
            axes.text(start_s + shown * end_s / 2, lane, words, **look)


def _draw_marks(axes: Axes, request: Request) -> None:
    """Draw TTFT and TTFB through all lanes, the earlier one's label above the other's."""
    there = [("TTFT", request.ttft_s, "--"), ("TTFB", request.ttfb_s, "-")]
    marks = sorted((at_s, name, dash) for name, at_s, dash in there if at_s is not None)
    look: Any = {"fontsize": 8.5, "fontweight": "bold", "annotation_clip": False}
    look |= {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for level, (at_s, name, dash) in enumerate(reversed(marks)):
        axes.axvline(at_s, color=INK, linewidth=1.1, linestyle=dash)
        words = f"{name} {seconds(at_s)}"
        axes.annotate(words, (at_s, 1.0), xytext=(3, 2 + 10 * level), **look)
