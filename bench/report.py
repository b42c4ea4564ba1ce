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
from collections.abc import Sequence
from pathlib import Path

from matplotlib import style

from bench.common.results import ResultsError
from bench.reporting.page import page_of
from bench.reporting.plots import pictures_over
from bench.reporting.sound import NoSoundError, spectrogram
from bench.reporting.sources import Source, load_sources, median_request
from bench.reporting.style import STYLE, Picture
from bench.reporting.tables import comparisons
from bench.reporting.timeline import timeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 if a file can't be shown."""
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
    """Write the page and its pictures. Returns the page's file.

    Raises ResultsError for a file that is no result, OSError where nothing can be written.
    """
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
    """Return all plots for which the files have data, and why other plots could not be drawn."""
    timelines, spectrograms, untimed, without_sound = [], [], [], []
    with style.context(STYLE):
        for source in sources:
            timed = median_request(source.requests, lambda r: not r.timeline)
            if timed is not None and timed.timeline:
                timelines.append(timeline(source, timed))
            elif source.requests:
                untimed.append(f"{source.title}: no timeline. Run the benchmark with --timeline 1.")
            # The request of the timeline, if its audio was saved.
            with_audio = median_request(
                source.requests, lambda r: (not r.audio_file, not r.timeline)
            )
            try:
                spectrograms += [spectrogram(source, with_audio)] if with_audio else []
            except NoSoundError as why:
                without_sound.append(f"{source.title}: no spectrogram: {why}")
        return [*timelines, *pictures_over(sources), *spectrograms], untimed + without_sound


if __name__ == "__main__":
    sys.exit(main())
