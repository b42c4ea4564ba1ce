"""The result files of a report: measured or replayed, and in what they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from bench.common.metrics import percentile
from bench.common.results import Results, ResultsError, load_results
from bench.reporting.rows import Case, Request, cases_of, requests_of
from bench.reporting.words import name_of, value_of

REPLAY = "REPLAY"
# Where things were written, and what was noted: nothing that a figure depends on.
_WITHOUT_EFFECT = {"json", "save_audio", "timeline"}


@dataclass(frozen=True)
class Source:
    """A result file. letter: what it is called in the report.

    is_replay: its times are those of a profile, put together by a simulation; nothing was measured.
    """

    letter: str
    file: Path
    results: Results
    is_replay: bool
    requests: tuple[Request, ...]
    cases: tuple[Case, ...]

    @property
    def title(self) -> str:
        label = f" ({REPLAY})" if self.is_replay else ""
        return f"{self.letter}: {self.file.name}{label}"

    @property
    def concurrency(self) -> int:
        """Requests at a time; 1 where the benchmark knows no other."""
        value = self.results.settings.get("concurrency")
        return value if isinstance(value, int) else 1

    @property
    def what_ran(self) -> str:
        """Model, precision and machine in a line; of a replay, whose stage times they are."""
        if self.is_replay:
            profiles = sorted({case.profile for case in self.cases} - {""})
            of = f" of {', '.join(profiles)}" if profiles else ""
            return f"stage times{of}, put together by a simulation"
        return ", ".join(word for word in (self.model, self._dtype, self.machine) if word)

    @property
    def model(self) -> str:
        settings = self.results.settings
        if settings.get("model"):
            return Path(str(settings["model"])).name
        size = settings.get("size")
        return f"{size} checkpoint of random weights" if size else ""

    @property
    def _dtype(self) -> str:
        settings = self.results.settings
        # Without --model the checkpoint is made for the run, in float32 (model_choice.py).
        made = "float32" if settings.get("size") and not settings.get("model") else ""
        dtype = settings.get("dtype")
        return made if dtype in (None, "auto") else str(dtype)

    @property
    def machine(self) -> str:
        machine = self.results.versions.get("machine")
        if not isinstance(machine, dict):
            return ""
        cores = machine.get("cores")
        return f"{machine.get('cpu')}" + (f", {cores} cores" if cores else "")


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in two files. kind: setting, version, machine or kind."""

    kind: str
    name: str
    first: str
    second: str


def load_sources(files: Sequence[Path]) -> list[Source]:
    """Read result files and call them A, B, C. Raises ResultsError, which names the file."""
    if len(files) > len(ascii_uppercase):
        raise ResultsError(f"{len(files)} files: a report has room for {len(ascii_uppercase)}.")
    return [_source(letter, file) for letter, file in zip(ascii_uppercase, files, strict=False)]


def differences(first: Source, second: Source) -> list[Difference]:
    """All that may be why two files differ: what kind they are of, settings, versions, machine."""
    found = []
    if first.is_replay != second.is_replay:
        kinds = [REPLAY if source.is_replay else "measured" for source in (first, second)]
        found.append(Difference("kind", "of the figures", *kinds))
    places = (
        ("setting", first.results.settings, second.results.settings),
        ("version", _libraries(first), _libraries(second)),
        ("machine", _machine(first), _machine(second)),
    )
    for kind, ours, theirs in places:
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in _WITHOUT_EFFECT and ours.get(name) != theirs.get(name):
                values = [setting_text(place, name) for place in (ours, theirs)]
                found.append(Difference(kind, name.replace("_", " "), *values))
    return found


def setting_text(settings: dict[str, Any], name: str) -> str:
    """A setting's value, or that there is none."""
    if name not in settings:
        return "not there"
    value = settings[name]
    return "not given" if value is None else value_of(name, value)


def configuration(source: Source, beside: Sequence[Source], without: Sequence[str] = ()) -> str:
    """What sets a file's settings apart from those of the others.

    without: settings that are not to be named.
    """
    settings = source.results.settings
    names = [
        name
        for name, value in settings.items()
        if name not in _WITHOUT_EFFECT
        and name not in without
        and any(other.results.settings.get(name) != value for other in beside)
    ]
    return ", ".join(f"{name_of(name)} {setting_text(settings, name)}" for name in names)


def median_request(requests: Sequence[Request], among: Sequence[Request]) -> Request | None:
    """Of some requests the one whose TTFB is nearest to the median of all; None of none."""
    all_s = [request.ttfb_s for request in requests if request.ttfb_s is not None]
    speaking = [request for request in among if request.ttfb_s is not None]
    if not speaking:
        return None
    middle_s = percentile(all_s, 50)
    return min(speaking, key=lambda request: abs((request.ttfb_s or 0.0) - middle_s))


def _source(letter: str, file: Path) -> Source:
    results = load_results(file)
    is_replay = (
        results.benchmark == "replay"
        or "replay" in (results.settings.get("label"), results.summary.get("label"))
        or any("replay" in (row.get("kind"), row.get("label")) for row in results.rows)
    )
    requests, cases = requests_of(results.rows, str(file)), cases_of(results.rows, str(file))
    return Source(letter, file, results, is_replay, tuple(requests), tuple(cases))


def _libraries(source: Source) -> dict[str, Any]:
    return {name: v for name, v in source.results.versions.items() if name != "machine"}


def _machine(source: Source) -> dict[str, Any]:
    machine = source.results.versions.get("machine")
    return machine if isinstance(machine, dict) else {}
