"""Stage latencies: a JSON file of how long each stage takes, which bench.replay runs over.

    {
      "name": "my-trn2",
      "source": "bench/stages.py on a trn2.48xlarge, SDK 2.31, 2026-06-01",
      "stages": {
        "thinker_prefill": {
          "rule": "bucket",
          "seconds": {"512": 0.021, "2048": 0.034},
          "source": "median of 20 calls"
        },
        ...
      }
    }

Every stage of STAGES is there. `seconds` has the time of one call by its size; STAGES says what
the size counts. `rule` gives the time of a call of another size:
  - "bucket": the time of the next larger size, since calls are padded to it; a call larger than the
    largest size is an error.
  - "line": linear interpolation between the sizes, and extrapolation beyond them, never below 0. A
    size "0" gives the fixed cost of a call; one size alone holds for all.
`source` says where the seconds are from, and why the rule is right.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.compilation.manifest import write_json
from testing.command_line import InputError, Row

# What a call's size counts.
STAGES = {
    "preprocessing": "seconds of audio, on the host, before anything else",
    "encoders": "windows of 8 s of audio",
    "thinker_prefill": "rows of the prompt",
    "thinker_decode": "slots",
    "talker_prefill": "rows of the talker's prompt",
    "talker_step": "slots",
    "code_predictor": "slots",
    "code2wav_start": "frames, of all streams together",
    "code2wav_step": "frames, of all streams together",
    "driver_start": "requests; host time of the program that calls the stages, before a prefill",
    "driver_frame": "slots; host time of the program that calls the stages, for a step's frames",
}
WINDOW_MEL_FRAMES = 800  # 8 s
MEAN_PROMPT_ROWS = 1294  # published: see testing/replaying/load.py

# Each stage's rows of bench/stages.py, the size of a call, and the rule between sizes: a prompt is
# padded to a bucket, a step to a batch, so its time is that of the next larger measured size.
_MEASURED: dict[str, tuple[str, Callable[[Row], int], str]] = {
    "encoders": ("audio encoder", lambda row: -(-row["frames"] // WINDOW_MEL_FRAMES), "line"),
    "thinker_prefill": ("thinker prefill", lambda row: row["rows"], "bucket"),
    "thinker_decode": ("thinker decode", lambda row: row["batch"], "bucket"),
    "talker_step": ("talker step", lambda row: row["batch"], "bucket"),
    "code_predictor": ("code predictor", lambda row: row["batch"], "bucket"),
    "code2wav_start": ("code2wav start", lambda row: row["batch"] * row["frames"], "line"),
    "code2wav_step": ("code2wav step", lambda row: row["batch"] * row["frames"], "line"),
}
_NOT_MEASURED = ("preprocessing", "driver_start", "driver_frame")


class ProfileError(InputError):
    """A profile that can't be used, or that has no time for a call's size."""


@dataclass(frozen=True)
class StageLatency:
    """Seconds of a stage's call by its size, ascending; see the module's docstring."""

    stage: str
    rule: str
    seconds: tuple[tuple[int, float], ...]
    source: str

    def of(self, size: float) -> float:
        """Return the seconds of a call. Raises ProfileError above the largest bucket."""
        if self.rule == "bucket":
            for bucket, seconds in self.seconds:
                if bucket >= size:
                    return seconds
            raise ProfileError(
                f"stage {self.stage}: a call of size {size:g} ({STAGES[self.stage]}), and the "
                f"largest bucket is {self.seconds[-1][0]}. Add a larger bucket to the profile."
            )
        if len(self.seconds) == 1:
            return self.seconds[0][1]
        points = self.seconds
        upper = next((i for i, (at, _) in enumerate(points) if at >= size), len(points) - 1)
        (x0, y0), (x1, y1) = points[max(upper, 1) - 1], points[max(upper, 1)]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


@dataclass(frozen=True)
class StageProfile:
    """A latency for each of STAGES. saved_s: see bench.trn2.times.SpeechCalls."""

    name: str
    source: str
    stages: Mapping[str, StageLatency]
    saved_s: float = 0.0

    def seconds(self, stage: str, size: float) -> float:
        """Return the seconds of a call. Raises ProfileError above the largest bucket."""
        return self.stages[stage].of(size)

    def prefill_by_rows_s(self, rows: int) -> float:
        """Return the seconds of a thinker's prefill of these rows, with or without rows before.

        A profile with one size has no time for fewer rows. A row is taken to cost as much as in the
        mean prompt of the published load, and a prefill at least a decode step.
        """
        latency = self.stages["thinker_prefill"]
        seconds = latency.of(rows)
        if len(latency.seconds) > 1:
            return seconds
        share = min(1.0, rows / MEAN_PROMPT_ROWS)
        return max(seconds * share, self.seconds("thinker_decode", 1))

    @staticmethod
    def load(path: Path) -> "StageProfile":
        """Read a profile. Raises ProfileError, which names the file."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            stages = {name: _latency(name, value["stages"][name]) for name in STAGES}
            saved_s = float(value.get("saved_s", 0))
            return StageProfile(value["name"], value["source"], stages, saved_s)
        except OSError as error:
            raise ProfileError(f"{path} can't be read: {error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ProfileError(f"{path} is no profile: {error!r}.") from error

    def save(self, path: Path) -> None:
        """Write the profile in the form that `load` reads."""
        stages = {
            name: {
                "rule": latency.rule,
                "seconds": {str(size): seconds for size, seconds in latency.seconds},
                "source": latency.source,
            }
            for name, latency in self.stages.items()
        }
        value = {"name": self.name, "source": self.source, "saved_s": self.saved_s}
        write_json(path, value | {"stages": stages})


def measured_profile(rows: Sequence[Row], name: str, source: str) -> StageProfile:
    """Make a profile of the rows of bench/stages.py.

    The slowest of several calls of one size counts: the one with the longest KV cache. Raises
    ProfileError if a stage has no row, for example if the model does not speak.
    """
    stages = {}
    for stage, (measured, size_of, rule) in _MEASURED.items():
        table = _table(rows, measured, size_of)
        stages[stage] = StageLatency(stage, rule, table, f"median of {measured}")
    prepared = dict(_table(rows, "talker prepare", lambda row: row["rows"]))
    last = dict(_table(rows, "talker prefill", lambda row: row["rows"]))
    if strange := sorted(prepared.keys() ^ last.keys()):
        raise ProfileError(f"talker prepare and talker prefill differ in rows {strange}.")
    both = tuple((size, seconds + last[size]) for size, seconds in prepared.items())
    stages["talker_prefill"] = StageLatency(
        "talker_prefill", "bucket", both, "medians of talker prepare and talker prefill, added"
    )
    for stage in _NOT_MEASURED:
        stages[stage] = StageLatency(stage, "line", ((0, 0.0),), "not measured, taken as 0")
    return StageProfile(name, source, stages)


def _latency(stage: str, value: Any) -> StageLatency:
    points = sorted((int(size), float(seconds)) for size, seconds in value["seconds"].items())
    return StageLatency(stage, value["rule"], tuple(points), value["source"])


def _table(
    rows: Sequence[Row], stage: str, size_of: Callable[[Row], int]
) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for row in rows:
        if row["stage"] == stage:
            size = size_of(row)
            found[size] = max(row["median_s"], found.get(size, 0.0))
    if not found:
        raise ProfileError(f"no row of {stage}: a profile needs a model that speaks.")
    return tuple(sorted(found.items()))
