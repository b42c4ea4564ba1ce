"""A report of result files: one HTML page that needs nothing else, and its plots as PNG files.

    python -m bench.ttfb_rtf --timeline 20 --save-audio wavs/ --json result.json
    python -m bench.report result.json --out report/
    python -m bench.report before.json after.json --out report/    # side by side, with ratios

Plots: the timeline of one request by stage, TTFB by configuration, distributions of TTFT, ITL and
TTFB, RTF by concurrency, a spectrogram with chunk boundaries. A plot without data is replaced by
the reason. Replays are labelled, and share neither a plot nor a ratio with measurements.
"""

import argparse
import base64
import html
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, get_args, get_type_hints

import matplotlib
import numpy as np
import pandas as pd
import soundfile
from matplotlib.figure import Figure

from qwen3_omni_neuron.events import SAMPLE_RATE
from testing.command_line import Row
from testing.metrics import BEFORE_ANY_LIMIT, ChunkArrival, RequestMetrics, playing, silences
from testing.results import Results, ResultsError, load_results

REPLAY = " (REPLAY, not measured)"
# text.parse_math: a dollar sign in a setting is no formula.
STYLE: Any = {"figure.constrained_layout.use": True, "figure.dpi": 120, "text.parse_math": False}
NO_EFFECT = ("settings.save_audio", "settings.timeline")  # no figure depends on them
LEFT_OUT = ("mean", "p90", "p99")  # statistics that stand in the file only

# The fields that are read here: their types, or for a list of dicts the fields of each.
Fields = dict[str, Any]
CHUNK: Fields = {"arrival_s": float, "samples": int, "frames": int}
CALL: Fields = {"stage": str, "start_s": float, "end_s": float}
REQUEST: Fields = {"request": int, "conversation": str, "audio_file": str | None}
REQUEST |= {"chunks": CHUNK, "timeline": CALL, **get_type_hints(RequestMetrics)}
CASE: Fields = dict.fromkeys(("profile", "driven", "placement"), str | None)
CASE |= {"concurrency": int, "ttfb_p50_s": float, "ttfb_p95_s": float, "rtf_mean": float}

HEAD = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Benchmark report</title>
<style> body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.4 sans-serif; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ccc; }
img { max-width: 100%; }
</style><h1>Benchmark report</h1>"""


class NotDrawnError(Exception):
    """A plot has no data. The message is the reason."""


@dataclass(frozen=True)
class Source:
    """A result file with its checked rows: requests of ttfb_rtf.py, cases of replay.py.

    letter: its name in the report. is_replay: a simulation computed its times from a profile.
    """

    letter: str
    file: Path
    results: Results
    is_replay: bool
    title: str
    requests: list[Row]
    cases: list[Row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 where a file is no result or nothing can be written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of benchmarks (--json)")
    parser.add_argument("--out", type=Path, default=Path("report"), help="default: report/")
    options = parser.parse_args(arguments)
    try:
        sources = load_sources(options.results)
        options.out.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            plots = plot_parts(sources, options.out)
        page = "\n".join([HEAD, *summary_parts(sources), *plots])
        (options.out / "index.html").write_text(page, encoding="utf-8")
    except (ResultsError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    print(options.out / "index.html")
    return 0


def load_sources(files: Sequence[Path]) -> list[Source]:
    """Read result files and name them A, B, C. Raises ResultsError, which names the file."""
    if len(files) > len(ascii_uppercase):
        raise ResultsError(f"got {len(files)} files. Give at most {len(ascii_uppercase)}.")
    sources = []
    for letter, file in zip(ascii_uppercase, files, strict=False):
        results = load_results(file)
        labels = [one.get("label") for one in (results.settings, results.summary, *results.rows)]
        labels += [results.benchmark, *(row.get("kind") for row in results.rows)]
        rows = [(row, f"{file}: rows[{index}]") for index, row in enumerate(results.rows)]
        answered = [one for one in rows if "request" in one[0] and one[0].get("error") is None]
        requests = [checked(row, REQUEST, where) for row, where in answered]
        cases = [checked(row, CASE, where) for row, where in rows if "ttfb_p50_s" in row]
        title = f"{letter}: {file.name}" + REPLAY * (is_replay := "replay" in labels)
        sources.append(Source(letter, file, results, is_replay, title, requests, cases))
    return sources


def checked(row: Any, fields: Fields, where: str) -> Row:
    """Return the named fields of a row. Raises ResultsError for a value of another type."""
    if not isinstance(row, dict):
        raise ResultsError(f"{where} is a {type(row).__name__}, not a dict.")
    found: Row = {}
    for name, field in fields.items():
        value, kind = row.get(name), list | None if isinstance(field, dict) else field
        kinds = get_args(kind) or (kind,)
        is_valid = type(value) in kinds or (type(value) is int and float in kinds)
        if not is_valid or (isinstance(value, float) and not math.isfinite(value)):
            expected = getattr(kind, "__name__", kind)
            raise ResultsError(f"{where}.{name} is {value!r}, no valid {expected}.")
        if isinstance(field, dict):
            value = [checked(v, field, f"{where}.{name}[{n}]") for n, v in enumerate(value or [])]
        found[name] = value
    return found


def summary_parts(sources: Sequence[Source]) -> list[str]:
    """Return parts: headlines, files, summaries by benchmark with replays apart, settings."""
    parts = [tag("p", f"{s.title}: {line}") for s in sources for line in s.results.headline_texts]
    files = [(s.title, s.results.benchmark, " ".join(map(str, s.results.command))) for s in sources]
    parts += [table(pd.DataFrame(files, columns=["file", "benchmark", "command"]))]
    for name, is_replay in dict.fromkeys((s.results.benchmark, s.is_replay) for s in sources):
        group = [s for s in sources if (s.results.benchmark, s.is_replay) == (name, is_replay)]
        title = f"Summary of {name}, without {', '.join(LEFT_OUT)}" + REPLAY * is_replay
        parts.append(tag("h2", title))
        if len(group) > 1:
            note = "One run each: small differences may be noise. What differs in the settings:"
            parts += [tag("p", note), table(differences(group))]
        parts.append(table(summaries(group)))
    return [*parts, tag("h2", "Settings, versions and machines"), table(settings_of(sources))]


def summaries(group: Sequence[Source]) -> pd.DataFrame:
    """Return a column a file with its summary, and a column a further file with its ratios."""
    frame = side_by_side(group, [source.results.summary for source in group])
    frame = frame.loc[[name.rpartition(".")[2] not in LEFT_OUT for name in frame.index]]
    numbers = frame.map(lambda value: value if type(value) in (int, float) else math.nan)
    ratios = numbers.iloc[:, 1:].div(numbers.iloc[:, 0].replace(0, math.nan), axis=0)
    ratios.columns = [f"{source.letter} / {group[0].letter}" for source in group[1:]]
    return pd.concat([frame, ratios], axis=1).map(text)


def differences(sources: Sequence[Source]) -> pd.DataFrame:
    frame = settings_of(sources)
    return frame[(frame.nunique(axis=1) > 1) & ~frame.index.isin(NO_EFFECT)]


def settings_of(sources: Sequence[Source]) -> pd.DataFrame:
    """Return everything that a figure may depend on as texts, a column a file."""
    found = [{"settings": s.results.settings, "versions": s.results.versions} for s in sources]
    return side_by_side(sources, found).map(text)


def side_by_side(sources: Sequence[Source], values: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row a name of nested dicts ("all.ttfb_s.p50") with a value, and a column a file."""
    frame = pd.json_normalize(values).astype(object).T.dropna(how="all")
    return frame.set_axis([source.title for source in sources], axis=1)


def text(value: Any) -> str:
    """Return a value as text: floats with four digits, "-" for null and NaN."""
    if isinstance(value, list):
        return ", ".join(map(text, value))
    if isinstance(value, float) and not math.isnan(value):
        return np.format_float_positional(value, precision=4, fractional=False, trim="-")
    return "-" if value is None or isinstance(value, float) else str(value)


def tag(name: str, content: str) -> str:
    return f"<{name}>{html.escape(content)}</{name}>"


def table(frame: pd.DataFrame) -> str:
    """Return texts as an HTML table, escaped, not shortened, without row numbers."""
    is_named = not isinstance(frame.index, pd.RangeIndex)
    with pd.option_context("display.max_colwidth", None):
        return str(frame.to_html(escape=True, border=0, index=is_named))


def plot_parts(sources: Sequence[Source], out: Path) -> list[str]:
    """Write all plots and return parts of the page, for a plot without data the reason.

    A plot's function draws on a figure and returns the caption, or raises NotDrawnError.
    """
    single = [[source] for source in sources if source.requests]
    drawable = [source for source in sources if source.requests or source.cases]
    kinds = [[s for s in drawable if s.is_replay == is_replay] for is_replay in (False, True)]
    plots = [
        ("Timeline of one request", timeline, single),
        ("TTFB by configuration", ttfb, kinds),
        ("Distributions of TTFT, ITL and TTFB", latency, kinds),
        ("RTF by concurrency", rtf, kinds),
        ("Spectrogram with chunk boundaries", spectrogram, single),
    ]
    parts = [tag("p", f"{s.title}: no row to plot.") for s in sources if s not in drawable]
    for name, plot, groups in plots:
        for group in filter(None, groups):
            letters = [source.letter for source in group]
            title = f"{name}: {', '.join(letters)}" + REPLAY * group[0].is_replay
            figure = Figure(figsize=(9, 4.5))
            figure.suptitle(title)
            try:
                note = plot(group, figure)
            except NotDrawnError as reason:
                parts += [tag("h2", title), tag("p", f"Not drawn: {reason}")]
                continue
            file = out / f"{plot.__name__}-{''.join(letters).lower()}.png"
            figure.savefig(file)
            data = base64.b64encode(file.read_bytes()).decode("ascii")
            image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(title)}">'
            parts += [tag("h2", title), image, tag("p", note)]
    return parts


def timeline(group: list[Source], figure: Figure) -> str:
    """Draw the stages of one request: above all of it, below until its first sample."""
    request = median_request(group[0], "timeline", "--timeline 1")
    chunks = [ChunkArrival(c["arrival_s"], c["samples"], c["frames"]) for c in request["chunks"]]
    lanes: dict[str, list[tuple[float, float]]] = {}
    for call in request["timeline"]:
        lanes.setdefault(call["stage"], []).append((call["start_s"], call["end_s"]))
    lanes |= {"playback": playing(chunks, SAMPLE_RATE), "underrun": silences(chunks, SAMPLE_RATE)}
    ttft_s, ttfb_s = request["ttft_s"], request["ttfb_s"]
    ends_s = (request["total_s"], max(ttfb_s, ttft_s or 0))
    figure.set_figheight(3 + 0.5 * len(lanes))
    for axes, end_s in zip(figure.subplots(2, 1), ends_s, strict=True):
        for lane, spans in enumerate(lanes.values()):
            bars = [(start_s, until_s - start_s) for start_s, until_s in spans]
            axes.broken_barh(bars, (lane - 0.4, 0.8), color=f"C{lane}")
        axes.plot([chunk.at_s for chunk in chunks], [len(lanes) - 2.5] * len(chunks), "kv")
        axes.axvline(ttfb_s, color="black")
        if ttft_s is not None:
            axes.axvline(ttft_s, color="black", linestyle="--")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set(xlim=(0, 1.1 * end_s), ylim=(len(lanes) - 0.5, -0.5), xlabel="s since arrival")
    name = f"Request {request['request']} ({request['conversation']}), the median one by TTFB. "
    times = f"Dashed: TTFT {text(ttft_s)} s. Solid: TTFB {text(ttfb_s)} s. "
    return f"{name}{times}Triangles: chunks of {text([c.frames for c in chunks])} frames."


def ttfb(group: list[Source], figure: Figure) -> str:
    """Draw p50 and p95 of each file of requests and of each case."""
    rows = rows_of(group, "ttfb_s")
    bars = rows.groupby("bar", sort=False).agg(p50=("ttfb_s", "median"), p95=("p95_s", "max"))
    figure.set_figheight(2 + 0.6 * len(bars))
    axes = figure.subplots()
    bars.plot.barh(ax=axes, xlabel="TTFB, s", ylabel="")
    axes.invert_yaxis()
    named = bars.map(text).itertuples(name=None)
    return "; ".join(f"{bar}: p50 {p50} s, p95 {p95} s" for bar, p50, p95 in named)


def latency(group: list[Source], figure: Figure) -> str:
    """Draw the share of requests that waited no longer than a time."""
    rows = rows_of(group, "total_s")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), BEFORE_ANY_LIMIT, strict=True):
        for bar, part in rows.groupby("bar", sort=False):
            times = 1000 * part[name].dropna().sort_values()
            shares = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, shares, where="post", marker=".", label=bar)
        axes.set(xlabel=f"{name.removesuffix('_s')}, ms", xlim=(0, None), ylim=(0, 1.05))
    axes.legend()
    return f"Share of requests that waited no longer. Requests, also truncated ones: {len(rows)}."


def rtf(group: list[Source], figure: Figure) -> str:
    """Draw the median RTF of requests, or the mean of a case, truncated replies apart."""
    rows = rows_of(group, "rtf")
    medians = rows.groupby(["level", "series", "truncated"]).rtf.median().unstack([1, 2])
    axes = figure.subplots()
    medians.plot(ax=axes, marker="o", xlabel="requests at a time", ylabel="RTF")
    axes.set(xticks=medians.index, ylim=(0, None))
    return "Median of requests, mean of cases. Below 1, speech is made faster than it is played."


def rows_of(group: list[Source], field: str) -> pd.DataFrame:
    """Return the requests and cases that have a field, with the names of their bar and series."""
    rows, differing, apart = [], differences(group), ("concurrency", "requests", "seed")
    for source in group:
        pairs = [(name.partition("."), value) for name, value in differing[source.title].items()]
        own = {name: f"{name} {value}" for (top, _, name), value in pairs if top == "settings"}
        at_once = source.results.settings.get("concurrency")
        here = {
            "bar": ", ".join([source.letter, *own.values()]),
            "series": ", ".join(own[name] for name in own if name not in apart) or "all",
            "level": at_once if isinstance(at_once, int) else 1,
            "p95_s": pd.Series([r["ttfb_s"] for r in source.requests], dtype=float).quantile(0.95),
        }
        rows += [request | here for request in source.requests]
        for case in source.cases:
            words = (source.letter, case["profile"], case["driven"], case["placement"])
            series, level = ", ".join(filter(None, words)), case["concurrency"]
            figures = {"ttfb_s": case["ttfb_p50_s"], "p95_s": case["ttfb_p95_s"]}
            figures |= {"rtf": case["rtf_mean"], "level": level, "truncated": False}
            rows.append({"bar": f"{series}, {level} at a time", "series": series, **figures})
    names = ("bar", "series", "level", "truncated", "total_s", "rtf", "p95_s", *BEFORE_ANY_LIMIT)
    frame = pd.DataFrame(rows, columns=names).dropna(subset=field)
    if frame.empty:
        raise NotDrawnError(f"no row has {field}.")
    return frame


def median_request(source: Source, field: str, option: str) -> Row:
    """Return the request with the median TTFB, of those with speech and a field."""
    spoken = [r for r in source.requests if r["ttfb_s"] is not None and r["chunks"]]
    if not (having := sorted((r for r in spoken if r[field]), key=lambda r: r["ttfb_s"])):
        raise NotDrawnError(f"no request with speech has {field}. Run the benchmark with {option}.")
    return having[(len(having) - 1) // 2]


def spectrogram(group: list[Source], figure: Figure) -> str:
    """Draw a request's saved audio, with a line where a chunk ends and the next begins."""
    source, request = group[0], median_request(group[0], "audio_file", "--save-audio DIR")
    folder = Path(str(source.results.settings.get("save_audio") or "."))
    # As the benchmark named it, or moved along with the result file.
    places = [one / request["audio_file"] for one in (folder, source.file.parent / folder.name)]
    file = next(filter(Path.is_file, places), places[0])
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (OSError, soundfile.SoundFileError) as error:
        raise NotDrawnError(f"{file} can't be read: {error}") from error
    ends = np.cumsum([chunk["samples"] for chunk in request["chunks"]])
    if samples.shape != (ends[-1],):
        raise NotDrawnError(f"{file} has {len(samples)} samples, the request {ends[-1]}.")
    axes = figure.subplots()
    with np.errstate(divide="ignore"):  # digital silence is -inf dB and left white
        image = axes.specgram(samples, Fs=rate)[3]
    figure.colorbar(image, label="dB of full scale per Hz")
    axes.vlines(ends[:-1] / rate, 0, rate / 2, colors="red", linestyles="--")
    axes.set(xlabel="s of speech", ylabel="Hz")
    return f"Request {request['request']}, {request['audio_file']}. Dashed: a chunk ends."


if __name__ == "__main__":
    sys.exit(main())
