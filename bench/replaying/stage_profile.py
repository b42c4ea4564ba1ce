"""How long each stage of the model takes: a JSON file that bench/replay.py runs the runtime over.

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

Every stage of STAGES is there. `seconds` are those of one call by its size, which STAGES explains.
`rule` says what a call of another size takes:
  - "bucket": what the next larger size takes, since calls are padded to it; none is larger than the
    largest.
  - "line": what lies on the straight lines between the sizes, or beyond them on the outermost ones.
    A size "0" says what a call of any size takes at least; one size alone holds for all.
`source` says where the seconds are from, and why the rule is right.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.compilation.manifest import write_json

# What the size of a call is.
STAGES = {
    "preprocessing": "seconds of sound, on the host, before anything else",
    "encoders": "windows of 8 s of sound",
    "thinker_prefill": "rows of the prompt",
    "thinker_decode": "slots",
    "talker_prefill": "rows of the talker's prompt",
    "talker_step": "slots",
    "code_predictor": "slots",
    "code2wav_start": "frames, of all streams together",
    "code2wav_step": "frames, of all streams together",
    "driver_start": "requests; host time before a talker's prefill, of what drove the stages",
    "driver_frame": "slots; host time for the frames of one step, of what drove the stages",
}
RULES = ("bucket", "line")


class ProfileError(ValueError):
    """A profile that can't be used, or a call of a size that it has no time for."""


@dataclass(frozen=True)
class StageLatency:
    """Seconds of a call by its size: see the module's text. seconds: sizes ascending."""

    stage: str
    rule: str
    seconds: tuple[tuple[int, float], ...]
    source: str

    def of(self, size: float) -> float:
        """Seconds of a call. Raises ProfileError for one larger than the largest bucket."""
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
    """A profile: one latency for each of STAGES."""

    name: str
    source: str
    stages: Mapping[str, StageLatency]

    def seconds(self, stage: str, size: float) -> float:
        """What a call takes. Raises ProfileError for a size that the profile has no time for."""
        return self.stages[stage].of(size)

    @staticmethod
    def parse(value: Any) -> "StageProfile":
        """A profile from what its JSON holds. Raises ProfileError that says where it is wrong."""
        top = _keys("the profile", value, ("name", "source", "stages"))
        stages = _keys("stages", top["stages"], tuple(STAGES))
        return StageProfile(
            _text("name", top["name"]),
            _text("source", top["source"]),
            {name: _latency(name, stages[name]) for name in STAGES},
        )

    @staticmethod
    def load(path: Path) -> "StageProfile":
        """Read a profile. Raises ProfileError that names the file."""
        try:
            return StageProfile.parse(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ProfileError(f"{path} can't be read: {error}.") from error
        except ValueError as error:  # of json, and our own
            raise ProfileError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write it as `load` reads it."""
        stages = {
            name: {
                "rule": latency.rule,
                "seconds": {str(size): seconds for size, seconds in latency.seconds},
                "source": latency.source,
            }
            for name, latency in self.stages.items()
        }
        write_json(path, {"name": self.name, "source": self.source, "stages": stages})


def _latency(stage: str, value: Any) -> StageLatency:
    where = f"stage {stage}"
    fields = _keys(where, value, ("rule", "seconds", "source"))
    if fields["rule"] not in RULES:
        raise ProfileError(f"{where}: rule is one of {', '.join(RULES)}, got {fields['rule']!r}.")
    table = fields["seconds"]
    if not isinstance(table, dict) or not table:
        raise ProfileError(f"{where}: seconds is a table of at least one size, got {table!r}.")
    points = []
    for size, seconds in table.items():
        if not size.isascii() or not size.isdigit():
            raise ProfileError(f"{where}: a size is a whole number, got {size!r}.")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < math.inf:
            raise ProfileError(
                f"{where}, size {size}: seconds are a number of 0 or more, got {seconds!r}."
            )
        points.append((int(size), float(seconds)))
    if sorted(points) != points or len(dict(points)) < len(points):
        raise ProfileError(f"{where}: sizes ascend, got {', '.join(table)}.")
    return StageLatency(
        stage, fields["rule"], tuple(points), _text(f"{where}: source", fields["source"])
    )


def _keys(where: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is an object with {', '.join(names)}, got {value!r}.")
    if missing := [name for name in names if name not in value]:
        raise ProfileError(f"{where}: {', '.join(missing)} is missing.")
    if unknown := [name for name in value if name not in names]:
        raise ProfileError(f"{where}: unknown {', '.join(unknown)}. There is {', '.join(names)}.")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ProfileError(f"{where} is a text, got {value!r}.")
    return value
