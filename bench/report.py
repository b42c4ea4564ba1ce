"""A report of result files: one HTML page that needs nothing else, and its plots as PNG files.

    python -m bench.ttfb_rtf --timeline 20 --save-audio wavs/ --json result.json
    python -m bench.report result.json --out report/
    python -m bench.report before.json after.json --out report/    # side by side, with ratios

What is shown follows from what the files hold: the timeline of one request by stage (rows with a
timeline), TTFB by configuration, distributions of TTFT, ITL and TTFB, RTF by concurrency, a
spectrogram with chunk boundaries (audio that was saved). Files of one benchmark stand side by side,
what differs in how they were run first. Replays are labelled so, and never share a plot with what
was measured.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common.results import ResultsError
from bench.reporting.compare import comparisons
from bench.reporting.page import page_of
from bench.reporting.plots import latency_distributions, rtf_by_concurrency, ttfb_by_configuration
from bench.reporting.sound import NoSoundError, spectrogram
from bench.reporting.sources import Source, load_sources, median_request
from bench.reporting.style import Picture
from bench.reporting.timeline import timeline

Plot = Callable[[Sequence[Source]], Picture | None]
OVER_FILES: tuple[Plot, ...] = (ttfb_by_configuration, latency_distributions, rtf_by_concurrency)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where a file is none that can be shown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="result files of benchmarks (--json)")
    parser.add_argument("--out", type=Path, default=Path("report"), help="default: report/")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.results, options.out))
    except (ResultsError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    return 0


def write_report(files: Sequence[Path], out: Path) -> Path:
    """Returns the page. Raises ResultsError for a file that is no result, OSError where nothing can
    be written."""
    sources = load_sources(files)
    out.mkdir(parents=True, exist_ok=True)
    pictures, missing = draw(sources)
    page = page_of(sources, comparisons(sources), pictures, missing)
    for picture in pictures:
        (out / f"{picture.name}.png").write_bytes(picture.png)
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def draw(sources: Sequence[Source]) -> tuple[list[Picture], list[str]]:
    """All plots that the files have something for, and why one is not there that could be."""
    pictures, missing = [], []
    for source in sources:
        timed = [r for r in source.requests if r.calls and r.chunks]
        request = median_request(source.requests, timed)
        if request is not None:
            pictures.append(timeline(source, request))
        elif source.requests:
            missing.append(f"{source.title}: no timeline. Run the benchmark with --timeline 1.")
    for is_replay in (False, True):
        alike = [source for source in sources if source.is_replay == is_replay]
        pictures += [picture for plot in OVER_FILES if (picture := plot(alike)) is not None]
    for source in sources:
        spoken = [r for r in source.requests if r.chunks]
        # The one of the timeline, where there is one.
        heard = [r for r in spoken if r.audio_file] or spoken
        timed = [r for r in heard if r.calls]
        request = median_request(source.requests, timed or heard)
        if request is None:
            continue
        try:
            pictures.append(spectrogram(source, request))
        except NoSoundError as why:
            missing.append(f"{source.title}: no spectrogram: {why}")
    return pictures, missing


if __name__ == "__main__":
    sys.exit(main())
