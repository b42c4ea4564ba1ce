"""The timeline of one request: each engine's calls, and what a player has to play."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from bench.common.metrics import ChunkArrival, playback
from bench.reporting.rows import Call, Request
from bench.reporting.sources import Source
from bench.reporting.style import (
    INK,
    PAPER,
    QUIET,
    WAIT,
    Picture,
    colour_of,
    headline,
    new_figure,
    plain_grid,
    png_of,
    stages_in_order,
    styled,
)
from bench.reporting.words import scale_of, seconds

PLAYER = "playback"
CHUNK_SHADES = ("#333333", "#6e6e6e")  # white is read on both
SHADE = "#eef3f9"
PANEL_TITLE: dict[str, Any] = {"fontsize": 10, "pad": 26}  # room for TTFT and TTFB below
ROOM = 1.02  # of an axis, beyond its last mark


def timeline(source: Source, request: Request) -> Picture:
    """A Gantt chart of a request with calls and a first sample: all of it, and its beginning."""
    assert request.calls and request.ttfb_s is not None
    first_s = max(request.ttfb_s, request.ttft_s or 0.0)
    with styled():
        stages = stages_in_order([call.stage for call in request.calls])
        lanes = len(stages) + 1
        figure = new_figure(1.6 + 2 * (0.24 * lanes + 0.75))
        headline(
            figure,
            f"One reply, stage by stage: first sample after {seconds(request.ttfb_s)}",
            source.what_ran,
            source.is_replay,
        )
        whole, beginning = figure.subplots(2, 1)
        end_s = max(request.total_s, first_s)
        _draw(whole, request, stages, ROOM * end_s)
        _say_totals(whole, request, stages, ROOM * end_s)
        whole.set_title(f"All of it: {seconds(request.audio_s)} of speech", **PANEL_TITLE)
        shaded_s = min(1.12 * first_s, ROOM * end_s)
        whole.axvspan(0, scale_of(ROOM * end_s)[0] * shaded_s, color=SHADE, zorder=0, linewidth=0)
        _draw(beginning, request, stages, shaded_s)
        beginning.set_title("The shaded part of it: to the first sample", **PANEL_TITLE)
        beginning.set_facecolor(SHADE)
        return Picture(
            f"timeline-{source.letter.lower()}",
            f"Timeline of one request ({source.title})",
            _alt(request, stages),
            _note(request),
            png_of(figure),
        )


def lane_totals(calls: Sequence[Call]) -> dict[str, tuple[int, float]]:
    """How many calls each stage made, and what they took together, in seconds."""
    found: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        found[call.stage].append(call.end_s - call.start_s)
    return {stage: (len(times), sum(times)) for stage, times in found.items()}


def silences(request: Request) -> list[tuple[float, float]]:
    """From when until when a player that starts at the first sample has nothing to play."""
    second_a_sample = _second_a_sample(request)
    found, played_s = [], request.chunks[0].arrival_s if request.chunks else 0.0
    for chunk in request.chunks:
        if chunk.arrival_s > played_s:
            found.append((played_s, chunk.arrival_s))
        played_s = max(played_s, chunk.arrival_s) + chunk.samples * second_a_sample
    return found


def _draw(axes: Axes, request: Request, stages: Sequence[str], end_s: float) -> None:
    """One axis from the arrival to end_s."""
    scale, unit = scale_of(end_s)
    for lane, stage in enumerate(stages):
        bars = [
            (scale * call.start_s, scale * (call.end_s - call.start_s))
            for call in request.calls
            if call.stage == stage and call.start_s < end_s
        ]
        # An edge of its own colour: a call that is shorter than a pixel is seen.
        colour = colour_of(stage)
        axes.broken_barh(bars, (lane - 0.38, 0.76), color=colour, edgecolor=colour, linewidth=0.4)
    _draw_player(axes, request, len(stages), scale, end_s)
    _draw_marks(axes, request, scale)
    axes.set_yticks(range(len(stages) + 1), [*stages, PLAYER])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(stages) + 0.5, -0.6)
    axes.set_xlim(0, scale * end_s)
    axes.set_xlabel(f"{unit} since the request's arrival")
    plain_grid(axes, "x")


def _say_totals(axes: Axes, request: Request, stages: Sequence[str], end_s: float) -> None:
    """At the right of each lane, what its calls took together; of the player, when it ends."""
    totals = lane_totals(request.calls)
    counts = [(totals[stage][0], seconds(totals[stage][1])) for stage in stages]
    words = [took if count == 1 else f"{count} calls, {took}" for count, took in counts]
    second_a_sample = _second_a_sample(request)
    ends_s = 0.0
    for chunk in request.chunks:
        ends_s = max(ends_s, chunk.arrival_s) + chunk.samples * second_a_sample
    words.append(f"plays until {seconds(ends_s)}" if ends_s > end_s else "")
    for lane, text in enumerate(words):
        axes.annotate(
            text, (1.0, lane), xycoords=("axes fraction", "data"), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8, color=QUIET, annotation_clip=False,
        )  # fmt: skip


def _draw_player(axes: Axes, request: Request, lane: int, scale: float, end_s: float) -> None:
    second_a_sample, played_s = _second_a_sample(request), 0.0
    for number, chunk in enumerate(request.chunks):
        start_s = max(played_s, chunk.arrival_s)
        played_s = start_s + chunk.samples * second_a_sample
        shown_s = min(played_s, end_s) - start_s
        if shown_s <= 0:
            continue
        bar = [(scale * start_s, scale * shown_s)]
        axes.broken_barh(bar, (lane - 0.3, 0.6), color=CHUNK_SHADES[number % 2], linewidth=0)
        if shown_s > 0.05 * end_s:
            words = f"{chunk.frames} frame{'s' * (chunk.frames != 1)}"
            axes.text(
                scale * (start_s + shown_s / 2), lane, words if shown_s > 0.12 * end_s else
                str(chunk.frames), ha="center", va="center", fontsize=7.5, color=PAPER,
            )  # fmt: skip
    for from_s, to_s in silences(request):
        bar = [(scale * from_s, scale * (to_s - from_s))]
        axes.broken_barh(bar, (lane - 0.38, 0.76), facecolor=PAPER, edgecolor=WAIT, hatch="xxxx")
    arrivals = [scale * c.arrival_s for c in request.chunks if c.arrival_s <= end_s]
    axes.plot(arrivals, [lane - 0.42] * len(arrivals), "v", color=INK, markersize=4, clip_on=False)


def _draw_marks(axes: Axes, request: Request, scale: float) -> None:
    """TTFT and TTFB as lines through all lanes, the earlier one's label above the other's."""
    there = [("TTFT", request.ttft_s), ("TTFB", request.ttfb_s)]
    marks = sorted((at_s, name) for name, at_s in there if at_s is not None)
    for level, (at_s, name) in enumerate(marks):
        axes.axvline(scale * at_s, color=INK, linewidth=1.1, linestyle=("--", "-")[name == "TTFB"])
        axes.annotate(
            f"{name} {seconds(at_s)}", (scale * at_s, 1.0), xycoords=("data", "axes fraction"),
            xytext=(3, 2 + 10 * (len(marks) - 1 - level)), textcoords="offset points",
            ha="left", va="bottom", fontsize=8.5, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _second_a_sample(request: Request) -> float:
    samples = sum(chunk.samples for chunk in request.chunks)
    return request.audio_s / samples if samples else 0.0


def _alt(request: Request, stages: Sequence[str]) -> str:
    totals = lane_totals(request.calls)
    counts = [(stage, *totals[stage]) for stage in stages]
    calls = "; ".join(
        f"{stage} {count} call{'s' * (count != 1)}, {seconds(took_s)}"
        for stage, count, took_s in counts
    )
    ttft = "No text" if request.ttft_s is None else f"First text after {seconds(request.ttft_s)}"
    frames = ", ".join(str(chunk.frames) for chunk in request.chunks)
    return (
        f"Gantt chart of request {request.number} ({request.conversation}): {calls}. "
        f"{ttft} (TTFT), first sample after {seconds(request.ttfb_s or 0.0)} (TTFB). "
        f"{len(request.chunks)} chunks of {frames} frames; the last came after "
        f"{seconds(request.chunks[-1].arrival_s)} of {seconds(request.audio_s)} of speech. "
        f"{_waits(request)}"
    )


def _note(request: Request) -> str:
    shared = sum(call.slots > 1 for call in request.calls)
    words = [
        f"Request {request.number} ({request.conversation}), the one with a timeline whose TTFB is "
        "nearest to the median.",
        "Talker prepare: it reads its prompt while the thinker still works. A triangle is a chunk "
        "that arrives; the player starts with the first and plays a frame in 80 ms.",
        _waits(request),
    ]
    if shared:
        words.append(f"{shared} of {len(request.calls)} calls were shared with other requests.")
    if request.truncated:
        words.append("A token limit cut this reply.")
    return " ".join(words)


def _waits(request: Request) -> str:
    rate = 1 / _second_a_sample(request)
    arrivals = [ChunkArrival(c.arrival_s, c.samples, c.frames) for c in request.chunks]
    count, silent_s = playback(arrivals, round(rate))
    if not count:
        return "It never waits for samples."
    times = "once" if count == 1 else f"{count} times"
    return f"It waits {times} for samples, {seconds(silent_s)} in all (hatched)."
