"""Result files: one form for every benchmark, there whole or not at all.

    {"schema": 1, "benchmark": "ttfb_rtf", "command": ["bench/ttfb_rtf.py", "--requests", "8"],
     "versions": {"python": "3.11.7", "torch": "2.13.0", ..., "machine": {"cpu": ..., ...}},
     "settings": {...}, "rows": [{...}, ...], "summary": {...}, "headlines": [{...}, ...]}

settings: every argument, as it was used. rows: one a request or a case. headlines: those of
testing.headlines; files of earlier versions have none. Names end in their unit: _s seconds,
_mb mebibytes, _bytes.
"""

import json
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qwen3_omni_neuron.compilation.manifest import write_json
from qwen3_omni_neuron.compilation.versions import installed_versions
from testing.headlines import Headline, lines
from testing.memory import total_mb

SCHEMA = 1
_KINDS = {"benchmark": str, "command": list, "versions": dict, "settings": dict, "rows": list}
_KINDS |= {"summary": dict, "headlines": list}


class ResultsError(Exception):
    """A file that is no result of a benchmark, or of another version's benchmark."""


@dataclass(frozen=True)
class Results:
    """See the top of this file."""

    benchmark: str
    command: list[str]
    versions: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    headlines: list[Headline] = field(default_factory=list)

    @property
    def headline_texts(self) -> list[str]:
        """A line for each headline, with the dtype and the machine."""
        return lines(self.headlines, self.settings, self.versions.get("machine", {}))


def results_of(
    benchmark: str,
    arguments: Sequence[str] | None,
    options: Namespace,
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    headlines: Sequence[Headline] = (),
) -> Results:
    """Make results of a benchmark, with its command, settings, versions and machine.

    arguments: command-line arguments, None for this process's own; options: their parsed values. A
    key is left out of both.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if key := getattr(options, "key", None):
        given = [word.replace(key, "KEY") for word in given]
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    for name in ("json", "key"):
        settings.pop(name, None)
    return Results(
        benchmark,
        ["python", "-m", module_of(benchmark), *given],
        {**installed_versions(), "machine": machine()},
        settings,
        rows,
        summary,
        list(headlines),
    )


def module_of(name: str) -> str:
    """Return the module of a script: that of this name, if it has a dot, or bench.NAME."""
    return name if "." in name else f"bench.{name}"


def publish(results: Results, file: Path | None) -> None:
    """Print the summary, a figure a line, and last the headlines; write everything to a file.

    file: None for none.
    """
    if file is not None:
        save(results, file)
    for name, value in flat(results.summary):
        if value is not None:
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    print("", *results.headline_texts, sep="\n")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their path: "all.ttfb_s.p50"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def save(results: Results, file: Path) -> None:
    """Write all results in one piece."""
    write_json(file, {"schema": SCHEMA, **asdict(results)})


def load_results(file: Path) -> Results:
    """Read a result file. Raises ResultsError, which says what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{file} can't be read: {error}") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise ResultsError(f'{file} is no result of a benchmark: it has no "schema".')
    if (schema := content.pop("schema")) != SCHEMA:
        raise ResultsError(
            f"{file} has schema {schema!r}, and {SCHEMA} is read here. Run the benchmark again."
        )
    content.setdefault("headlines", [])
    if missing := sorted(_KINDS.keys() - content.keys()):
        raise ResultsError(f"{file} has no {', '.join(missing)}.")
    if strange := sorted(content.keys() - _KINDS.keys()):
        raise ResultsError(f"{file} has {', '.join(strange)}, which no result has.")
    for name, kind in _KINDS.items():
        if not isinstance(content[name], kind):
            found = type(content[name]).__name__
            raise ResultsError(f"{file}: {name} is a {found}, not a {kind.__name__}.")
    for index, row in enumerate(content["rows"]):
        if not isinstance(row, dict):
            raise ResultsError(f"{file}: rows[{index}] is a {type(row).__name__}, not a dict.")
    try:
        content["headlines"] = [Headline(**one) for one in content["headlines"]]
    except TypeError as error:
        raise ResultsError(f"{file}: headlines has something else: {error}.") from error
    return Results(**content)


def machine() -> dict[str, Any]:
    """Describe the machine. threads: number of torch's threads in this process."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_mb": round(total_mb()),
        "threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
