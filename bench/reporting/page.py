"""The page of a report: one HTML file that asks for nothing outside itself."""

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import StrictUndefined, Template

from bench.reporting.sources import REPLAY, Source
from bench.reporting.style import Picture
from bench.reporting.tables import Comparison, figures_of, settings_of


def page_of(
    sources: Sequence[Source],
    comparisons: Sequence[Comparison],
    pictures: Sequence[Picture],
    missing: Sequence[str],
) -> str:
    """Return the HTML. missing: what could not be shown, and why."""
    template = Template(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    names = sorted({source.results.benchmark for source in sources})
    return template.render(
        title=f"Benchmark report: {', '.join(names)}",
        sources=sources,
        comparisons=comparisons,
        pictures=[(one, base64.b64encode(one.png).decode("ascii")) for one in pictures],
        missing=missing,
        figures=[(source, figures_of(source)) for source in sources],
        settings=settings_of(sources),
        replay=REPLAY,
    )
