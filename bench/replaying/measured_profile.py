"""The rows of bench/stages.py as a profile that bench/replay.py runs over."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.replaying.stage_profile import StageLatency, StageProfile

WINDOW_MEL_FRAMES = 800  # 8 s

Row = Mapping[str, Any]

# Each stage of the replay: whose rows they are, the size of a call, and the rule between sizes. A
# prompt is padded to a bucket, a step to a batch: none is faster than the next larger one measured.
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


def measured_profile(rows: Sequence[Row], name: str, source: str) -> StageProfile:
    """rows: with every stage of a model that speaks. Of calls of one size the slowest counts, which
    is that with the longest KV cache. Raises ValueError where a stage has no row."""
    stages = {}
    for stage, (measured, size_of, rule) in _MEASURED.items():
        table = _table(rows, measured, size_of)
        stages[stage] = StageLatency(stage, rule, table, f"median of {measured}")
    prepared = dict(_table(rows, "talker prepare", lambda row: row["rows"]))
    last = dict(_table(rows, "talker prefill", lambda row: row["rows"]))
    if strange := sorted(prepared.keys() ^ last.keys()):
        raise ValueError(f"talker prepare and talker prefill differ in rows {strange}.")
    both = tuple((size, seconds + last[size]) for size, seconds in prepared.items())
    stages["talker_prefill"] = StageLatency(
        "talker_prefill", "bucket", both, "medians of talker prepare and talker prefill, added"
    )
    for stage in _NOT_MEASURED:
        stages[stage] = StageLatency(stage, "line", ((0, 0.0),), "not measured, taken as none")
    return StageProfile(name, source, stages)


def _table(
    rows: Sequence[Row], stage: str, size_of: Callable[[Row], int]
) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for row in rows:
        if row["stage"] == stage:
            size = size_of(row)
            found[size] = max(row["median_s"], found.get(size, 0.0))
    if not found:
        raise ValueError(f"no row of {stage}: a profile needs a model that speaks.")
    return tuple(sorted(found.items()))
