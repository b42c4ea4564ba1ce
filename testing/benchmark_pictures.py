"""The pictures of BENCHMARK.md, drawn from the tables in docs/benchmarks/.

The tables are the only place of the figures: a picture, and the words for those who do not see it,
are made of what they say.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from testing.bar_picture import Line, Rows, draw
from testing.call_cost import FRAME_S
from testing.imports import ROOT

PAGES = "docs/benchmarks"
FOLDER = "docs/plots"
FRAME_MS = 1e3 * FRAME_S
FRAMES = 48  # of the replies that are compared with others'
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Picture:
    """Bars with what is said about them; fields as those of `testing.bar_picture.draw`."""

    title: str
    rows: Rows
    unit: str
    note: str
    line: Line | None = None

    def svg(self) -> str:
        """Draw the picture."""
        return draw(self.title, self.rows, self.unit, self.line, stacked=False, decimals=2)

    def alt(self) -> str:
        """Say in words what the picture shows."""
        said = [
            f"{label}: " + ", ".join(f"{name} {round(x, 2):g}" for name, x in parts.items())
            for label, parts in self.rows.items()
        ]
        return f"{self.title}. " + "; ".join(said)


def cells(text: str, section: str, *columns: str) -> list[tuple[str, ...]]:
    """Return the cells under these columns of the one table of a section that has them all.

    text: a document in Markdown. Raises ValueError where the section or the table is missing, or
    two tables have the columns.
    """
    pattern = rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the document has no section {section!r}.")
    tables = []
    for lines in re.findall(r"(?:^\|.*\n)+", found[1], re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in x.split("|")[1:-1]] for x in lines.splitlines())
        if set(columns) <= set(head):
            places = [head.index(column) for column in columns]
            tables.append([tuple(row[place] for place in places) for row in rows])
    if len(tables) != 1:
        raise ValueError(
            f"section {section!r} has {len(tables)} tables with the columns {', '.join(columns)}, "
            "and a picture is drawn from one: mend the table or testing/benchmark_pictures.py."
        )
    return tables[0]


def numbers(cell: str) -> list[float]:
    """Return the numbers in a cell, such as 3.0 and 46.0 of `3.0 ms, 46.0`."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(cell)]


def whole_reply(text: str) -> Picture:
    """Compare the time of a whole reply with transformers' and OpenVINO's."""
    rows = {}
    section = "Against transformers' `generate`"
    columns = ("checkpoint", "question", "ours, ms", "transformers, ms")
    for name, *row in cells(text, section, *columns):
        if name.startswith("small"):
            question, ours, theirs = row
            rows[f"{question} question"] = {
                "this package": numbers(ours)[0],
                "transformers": numbers(theirs)[0],
            }
    return Picture(
        f"Whole reply of {FRAMES} frames, ms",
        {**_beside_openvino(text, "whole reply"), **rows},
        "ms",
        "`small` (155 M random parameters), two cores. Left of the line a reply takes less time "
        "to compute than to play: RTF below 1. See "
        "[other packages](docs/benchmarks/comparisons.md).",
        (FRAMES * FRAME_MS, f"{FRAMES * FRAME_MS:.0f} ms: as long as it plays"),
    )


def first_sample(text: str) -> Picture:
    """Compare the time to the first sample with OpenVINO's."""
    return Picture(
        "First sample of speech, ms",
        _beside_openvino(text, "first sample, 1-frame chunks"),
        "ms",
        "From the request on, with the same checkpoint and prompt. See "
        "[OpenVINO](docs/benchmarks/comparisons.md#against-openvino).",
    )


def _beside_openvino(text: str, column: str) -> Rows:
    table = cells(text, "Against OpenVINO", "ms, MB", column)
    found = [row for row in table if row[0] != "ratio"]
    return {
        label: {"this package": numbers(ours)[0], "OpenVINO": numbers(theirs)[0]}
        for label, (_, ours), (_, theirs) in zip(
            ("both in float32", "both by default", "both in int8"),
            found[::2],
            found[1::2],
            strict=True,
        )
    }


def after_speech(text: str) -> Picture:
    """Show the first sample by turn, with the prefix cache and without."""
    rows = {
        f"turn {turn}": {
            "computed while it arrives": numbers(ours)[0],
            "all computed at its end": numbers(anew)[0],
        }
        for turn, ours, anew in cells(
            text, "After the end of speech", "turn", "first sample", "anew"
        )
    }
    return Picture(
        "End of 15 s of speech to the first sample, ms",
        rows,
        "ms",
        "`small`. Rows of earlier turns stay in the KV cache, and speech is prefilled while it "
        "arrives, so the tenth turn waits about as long as the second. See "
        "[After the end of speech](docs/benchmarks/sessions.md).",
    )


def clients_at_once(text: str) -> Picture:
    """Show the throughput by clients at once."""
    columns = ("clients", "API: first audio, replies/s", "HTTP: first audio, replies/s")
    rows = {
        f"{clients} at once": {"Python API": numbers(api)[-1], "HTTP": numbers(http)[-1]}
        for clients, api, http in cells(text, "Over HTTP", *columns)
    }
    return Picture(
        "Replies a second by clients at once",
        rows,
        "/s",
        "`tiny` (1.4 M random parameters), streamed replies of up to 48 frames; clients and model "
        "share two cores. See [Over HTTP](docs/benchmarks/serving.md#over-http).",
    )


def released_frame(text: str) -> Picture:
    """Show the time of a frame at the released size."""
    figures: dict[str, str] = {}
    for figure, value in cells(text, "The released size", "figure", "with AVX-512"):
        figures[figure] = value
    rows = {
        "with AVX-512": {
            "measured": FRAME_MS * numbers(figures["RTF"])[0],
            "its parts by the machine's rates": FRAME_MS
            * numbers(figures["RTF if every part ran at its limit"])[0],
        }
    }
    return Picture(
        "The released size in int4: time of one frame, ms",
        rows,
        "ms",
        "35 G random parameters, two cores: RTF times 80 ms, so that the prompt is included. "
        "Where a bar crosses the line, speech is slower to compute than to play. See "
        "[The released size](docs/benchmarks/released.md).",
        (FRAME_MS, f"{FRAME_MS:.0f} ms: as long as it plays"),
    )


PICTURES: dict[str, Callable[[str], Picture]] = {
    "reply": whole_reply,
    "first-sample": first_sample,
    "turns": after_speech,
    "clients": clients_at_once,
    "released-frame": released_frame,
}


def tables() -> str:
    """Return the text of all pages with tables."""
    pages = sorted((ROOT / PAGES).glob("*.md"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def svg(name: str) -> str:
    """Draw one picture."""
    return PICTURES[name](tables()).svg()


def block() -> str:
    """Write the pictures with their notes, as Markdown of BENCHMARK.md."""
    text = tables()
    parts = []
    for name, picture_of in PICTURES.items():
        picture = picture_of(text)
        note = textwrap.fill(picture.note, 110, break_on_hyphens=False)
        parts.append(f"![{picture.alt()}]({FOLDER}/{name}.svg)\n\n{note}\n")
    return "\n".join(parts)
