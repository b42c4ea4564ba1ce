"""The style of every plot of a report, beside report.mplstyle, and its way to an image."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.reporting.sources import REPLAY

STYLE = Path(__file__).with_name("report.mplstyle")
INK, GREY, PAPER = "#1a1a1a", "#595959", "#ffffff"
# Hues as in report.mplstyle.
STAGES = {
    "preprocessing": "#767676",
    "thinker prefill": "#0060a0",
    "thinker decode": "#2e8fcc",
    "talker prepare": "#7a5200",
    "talker prefill": "#c04a00",
    "talker step": "#c07f00",
    "code predictor": "#b8568f",
    "code2wav": "#00805c",
}
CHUNK_SHADES = ("#333333", "#6e6e6e")  # white text is readable on both


@dataclass(frozen=True)
class Picture:
    """A plot for the page and for a file beside it. name: the file's name, without .png.

    alt: what the plot shows, with the numbers. note: what a reader must know to read it.
    """

    name: str
    title: str
    alt: str
    note: str
    png: bytes


def new_figure(height_in: float, title: str, below: str, is_replay: bool) -> Figure:
    """Return a figure with its title, and a label across it if nothing was measured."""
    figure = Figure()
    figure.set_figheight(height_in)
    words = f"{REPLAY}, not measured: {title}" if is_replay else title
    # The second line leaves room for the text below.
    figure.suptitle(f"{words}\n", x=0.008, ha="left", fontsize=12, fontweight="bold")
    figure.text(0.008, 1 - 0.34 / height_in, below, ha="left", va="top", color=GREY)
    if is_replay:
        look: Any = {"fontsize": 60, "fontweight": "bold", "alpha": 0.08, "rotation": 20}
        figure.text(0.5, 0.5, REPLAY, ha="center", va="center", **look)
    return figure


def time_axis(axes: Axes, longest_s: float, label: str = "", room: float = 1.0) -> None:
    """Let the x axis run from 0 s to `room` times the longest; below 1 s its unit is ms."""
    axes.set_xlim(0, room * longest_s or 1.0)
    if longest_s < 1:
        axes.xaxis.set_major_formatter(lambda at_s, _: f"{1e3 * at_s:g}")
    axes.set_xlabel(f"{'ms' if longest_s < 1 else 's'} {label}")


def row_axis(axes: Axes, names: list[str], beside: list[str], **look: Any) -> None:
    """Name the rows of a plot, from the top, and write a text at the right of each."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    place: Any = axes.get_yaxis_transform()
    for row, words in enumerate(beside):
        axes.text(1.012, row, words, transform=place, va="center", **look)


def png_of(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
