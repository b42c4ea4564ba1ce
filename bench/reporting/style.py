"""How every plot of a report looks: colours, sizes, and how it becomes a picture."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from bench.reporting.sources import REPLAY

INK, QUIET, GRID, PAPER = "#1a1a1a", "#595959", "#d9d9d9", "#ffffff"
WAIT = "#b00020"
# Hues of Okabe and Ito, told apart by the colour-blind as well; the light ones darkened until they
# stand out from white (3 : 1).
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
OTHER_STAGE = "#444444"
SERIES = ("#0060a0", "#c04a00", "#00805c", "#b8568f", "#c07f00", "#2e8fcc", "#444444", "#7a5200")
Dash = Literal["-", "--", "-.", ":"]
DASHES: tuple[Dash, ...] = ("-", "--", "-.", ":")
WIDTH_IN, DPI = 9.0, 160  # 1440 pixels
# Any: the stubs of newer versions of matplotlib name each key.
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


@dataclass(frozen=True)
class Picture:
    """A plot as it goes into the page and beside it. name: of its file, without .png.

    alt: what is to be seen, with the numbers. note: what a reader must know to read it.
    """

    name: str
    title: str
    alt: str
    note: str
    png: bytes


def styled() -> AbstractContextManager[None]:
    """Within it, plots are drawn in the report's style."""
    return matplotlib.rc_context(STYLE)


def new_figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")


def png_of(figure: Figure, colours: int = 128) -> bytes:
    """The file. colours: as many as it keeps, which makes it a third as large."""
    canvas, file = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    drawing = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    # MAXCOVERAGE keeps the ends of a colour scale, where few pixels lie.
    few = drawing.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, format="png", optimize=True)
    return file.getvalue()


def headline(figure: Figure, title: str, below: str, is_replay: bool) -> None:
    """Title of a plot, what it was run on below, and the label of what was not measured."""
    words = f"{REPLAY}, not measured: {title}" if is_replay else title
    # The second line keeps room for what stands below.
    figure.suptitle(f"{words}\n", x=0.008, ha="left", fontsize=12, fontweight="bold")
    figure.text(0.008, 1 - 0.34 / figure.get_figheight(), below, ha="left", va="top", color=QUIET)
    if is_replay:
        figure.text(
            0.5, 0.5, REPLAY, fontsize=60, fontweight="bold", color=INK, alpha=0.08,
            ha="center", va="center", rotation=20,
        )  # fmt: skip


def colour_of(stage: str) -> str:
    return STAGES.get(stage, OTHER_STAGE)


def stages_in_order(stages: Sequence[str]) -> list[str]:
    """Those that are there, as a request goes through them; unknown ones last."""
    found = set(stages)
    return [s for s in STAGES if s in found] + sorted(found - STAGES.keys())


def from_zero(axes: Axes, longest: float, axis: str = "x", room: float = 1.05) -> None:
    """Lengths are compared from 0 on."""
    limits = axes.set_xlim if axis == "x" else axes.set_ylim
    limits(0, room * longest if longest > 0 else 1.0)


def plain_grid(axes: Axes, axis: str) -> None:
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x" if axis == "x" else "y", color=GRID, linewidth=0.6)
