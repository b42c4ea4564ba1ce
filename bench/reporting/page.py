"""The page of a report: one HTML file that asks for nothing outside itself."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.reporting.compare import Comparison
from bench.reporting.sources import REPLAY, Source, setting_text
from bench.reporting.style import Picture
from bench.reporting.words import (
    NOTHING,
    STATISTICS,
    leaves,
    measured_name,
    name_of,
    title_of,
    value_of,
)

TEMPLATE = "page.html"
MOST_CASES = 60


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    name: str
    values: list[str]


@dataclass(frozen=True)
class Figures:
    """The summary of a file, and its cases. values: what is no distribution.

    columns, cases: its rows, where they are not requests; more: how many are left out.
    """

    source: Source
    distributions: list[Row]
    values: list[Row]
    columns: list[str]
    cases: list[list[str]]
    more: int


@dataclass(frozen=True)
class Table:
    """A column a file."""

    title: str
    rows: list[Row]


def page_of(
    sources: Sequence[Source],
    comparisons: Sequence[Comparison],
    pictures: Sequence[Picture],
    missing: Sequence[str],
) -> str:
    """The HTML. missing: what could have been shown and why it is not."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = data_uri
    names = sorted({source.results.benchmark for source in sources})
    return environment.get_template(TEMPLATE).render(
        title=f"Benchmark report: {', '.join(names)}",
        sources=sources,
        comparisons=comparisons,
        pictures=pictures,
        missing=missing,
        figures=[figures_of(source) for source in sources],
        settings=settings_of(sources),
        statistics=STATISTICS,
        replay=REPLAY,
    )


def data_uri(picture: Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode('ascii')}"


def figures_of(source: Source) -> Figures:
    """Every value of its summary that is there, and the rows that are no requests."""
    values: list[Row] = []
    distributions: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, value in leaves(source.results.summary):
        if value is None:
            continue
        if path[-1] in STATISTICS and len(path) > 1:
            distributions.setdefault(path[:-1], {})[path[-1]] = value
        else:
            values.append(Row(title_of(path), [value_of(measured_name(path), value)]))
    rows = [
        Row(title_of(path), [_statistic(path[-1], name, found) for name in STATISTICS])
        for path, found in distributions.items()
    ]
    others = [row for row in source.results.rows if "request" not in row]
    shown = others[:MOST_CASES]
    # A list or a dict is no cell: it stands in the file.
    columns = [
        name
        for name in dict.fromkeys(name for row in shown for name in row)
        if not any(isinstance(row.get(name), list | dict) for row in shown)
    ]
    cases = [[value_of(name, row.get(name)) for name in columns] for row in shown]
    named = [name_of(name) for name in columns]
    return Figures(source, rows, values, named, cases, len(others) - len(shown))


def settings_of(sources: Sequence[Source]) -> list[Table]:
    """All settings, versions and machines side by side."""

    def machine_of(source: Source) -> dict[str, Any]:
        machine = source.results.versions.get("machine")
        return machine if isinstance(machine, dict) else {}

    def libraries_of(source: Source) -> dict[str, Any]:
        return {name: v for name, v in source.results.versions.items() if name != "machine"}

    return [
        _table("Settings", sources, lambda source: source.results.settings),
        _table("Versions", sources, libraries_of),
        _table("Machine", sources, machine_of),
    ]


def _table(
    title: str, sources: Sequence[Source], values_of: Callable[[Source], dict[str, Any]]
) -> Table:
    columns = [values_of(source) for source in sources]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [
        Row(name_of(name), [setting_text(c, name) if name in c else NOTHING for c in columns])
        for name in names
    ]
    return Table(title, rows)


def _statistic(figure: str, name: str, found: dict[str, Any]) -> str:
    return value_of("count" if name == "count" else figure, found.get(name))
