"""The result files of a report: measured or replayed, and what they ran."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from markupsafe import Markup

from bench.common.results import Results, ResultsError, load_results
from bench.reporting.rows import Case, Request, parsed
from bench.reporting.words import name_of, value_of

REPLAY = "REPLAY"
# Settings that say where something was written, and what was noted: no figure depends on them.
WITHOUT_EFFECT = {"json", "save_audio", "timeline"}


@dataclass(frozen=True, eq=False)
class Source:
    """A result file. letter: its name in the report.

    is_replay: its times are those of a profile, put together by a simulation; nothing was measured.
    """

    letter: str
    file: Path
    results: Results
    is_replay: bool
    requests: list[Request]
    cases: list[Case]

    @property
    def title(self) -> str:
        return f"{self.letter}: {self.file.name}" + f" ({REPLAY})" * self.is_replay

    def __html__(self) -> str:
        """Return its title as the page has it."""
        badge = Markup(' <span class="replay">{}</span>').format(REPLAY)
        return Markup("{}: {}").format(self.letter, self.file.name) + badge * self.is_replay

    @property
    def concurrency(self) -> int:
        """Concurrent requests; 1 if the benchmark has no other number."""
        value = self.results.settings.get("concurrency")
        return value if isinstance(value, int) else 1

    @property
    def about(self) -> dict[str, dict[str, Any]]:
        """Everything that a figure may depend on: its settings, versions and machine."""
        versions = dict(self.results.versions)
        machine = versions.pop("machine", None)
        machine = machine if isinstance(machine, dict) else {}
        return {"setting": self.results.settings, "version": versions, "machine": machine}

    @property
    def what_ran(self) -> str:
        """Model, precision and machine in a line; for a replay, the source of its stage times."""
        if self.is_replay:
            profiles = sorted({case.profile for case in self.cases if case.profile})
            of = f" of {', '.join(profiles)}" if profiles else ""
            return f"stage times{of}, put together by a simulation"
        settings, machine = self.results.settings, self.about["machine"]
        model, dtype = str(settings.get("model") or ""), settings.get("dtype")
        dtype = "" if dtype in (None, "auto") else str(dtype)
        if not model and (size := settings.get("size")):
            # Without --model the checkpoint is made for the run, see bench/common/models.py.
            model, dtype = f"{size} checkpoint of random weights", dtype or "mixed"
        cores = f"{machine['cores']} cores" if machine.get("cores") else ""
        words = (Path(model).name, dtype, str(machine.get("cpu", "")), cores)
        return ", ".join(filter(None, words))


def load_sources(files: Sequence[Path]) -> list[Source]:
    """Read result files and call them A, B, C. Raises ResultsError, which names the file."""
    if len(files) > len(ascii_uppercase):
        raise ResultsError(f"{len(files)} files: a report has room for {len(ascii_uppercase)}.")
    sources = []
    for letter, file in zip(ascii_uppercase, files, strict=False):
        results = load_results(file)
        labels = [one.get("label") for one in (results.settings, results.summary, *results.rows)]
        labels += [results.benchmark, *(row.get("kind") for row in results.rows)]
        rows = [(row, f"{file}: rows[{index}]") for index, row in enumerate(results.rows)]
        answered = [(row, at) for row, at in rows if "request" in row and row.get("error") is None]
        requests = [parsed(Request, row, at) for row, at in answered]
        cases = [parsed(Case, row, at) for row, at in rows if "ttfb_p50_s" in row]
        sources.append(Source(letter, file, results, "replay" in labels, requests, cases))
    return sources


def setting_text(settings: dict[str, Any], name: str) -> str:
    """Return a setting's value, or a text that there is none."""
    if name not in settings:
        return "not there"
    return "not given" if settings[name] is None else value_of(name, settings[name])


def configuration(source: Source, beside: Sequence[Source], without: Sequence[str] = ()) -> str:
    """Return the settings of a file that others don't have, except those of `without`."""
    settings = source.results.settings
    names = [
        name
        for name, value in settings.items()
        if name not in {*WITHOUT_EFFECT, *without}
        and any(other.results.settings.get(name) != value for other in beside)
    ]
    return ", ".join(f"{name_of(name)} {setting_text(settings, name)}" for name in names)


def median_request(
    requests: Sequence[Request], unwanted: Callable[[Request], Any] = lambda _: ()
) -> Request | None:
    """Return the request with the TTFB nearest to the median, the least unwanted, or None."""
    spoken = {n: r.ttfb_s for n, r in enumerate(requests) if r.ttfb_s is not None and r.chunks}
    if not spoken:
        return None
    middle_s = statistics.median(spoken.values())
    return requests[min(spoken, key=lambda n: (unwanted(requests[n]), abs(spoken[n] - middle_s)))]
