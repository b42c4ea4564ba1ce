"""Figures as a report writes them: with their unit, and whether more of it is better."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

STATISTICS = ("count", "mean", "p50", "p90", "p95", "p99")
_NAMES = {
    **{"ttft_s": "TTFT", "itl_s": "ITL", "ttfb_s": "TTFB", "rtf": "RTF"},
    **{"wer": "WER", "cer": "CER", "audio_s": "audio"},
    # Groups of metrics.summarize.
    **{name: f"{name} replies" for name in ("complete", "truncated")},
    "all": "all requests",
}
# Lengths of questions or answers: neither direction is better.
_LENGTHS = {"wall_s", "audio_s"}
_LESS_IS_BETTER = {"rtf", "wer", "cer", "underruns", "requests_with_underruns", "failed_requests"}

Path = tuple[str, ...]


def leaves(summary: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of nested dicts, with the path of names to it."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def is_statistic(path: Path) -> bool:
    return len(path) > 1 and path[-1] in STATISTICS


def measured_name(path: Path) -> str:
    """Return the field of a value: "ttfb_s" for all, ttfb_s, p50; "count" for a count."""
    return path[-2] if is_statistic(path) and path[-1] != "count" else path[-1]


def less_is_better(path: Path) -> bool | None:
    """Return True if less is better, False if more is better, or None if neither is."""
    name = measured_name(path)
    if name.endswith("_per_s"):
        return False
    if name in _LENGTHS:
        return None
    return True if name in _LESS_IS_BETTER or name.endswith(("_s", "_mb")) else None


def title_of(path: Path) -> str:
    """Return the path of names to a value, the last one first: "TTFB p50, all requests"."""
    *above, last = path
    first = f"{name_of(above.pop())} {last}" if is_statistic(path) else name_of(last)
    return ", ".join([first, *map(name_of, reversed(above))])


def name_of(name: str) -> str:
    """Return a field's name without its unit, which is shown with the value."""
    if name in _NAMES:
        return _NAMES[name]
    if name.endswith("_per_s"):
        return f"{name_of(name.removesuffix('_per_s'))} a second"
    return re.sub("(_s|_mb|_bytes)$", "", name).replace("_", " ")


def text_of(path: Path, value: Any) -> str:
    """Return a value of a summary with its unit."""
    return value_of(measured_name(path), value)


def value_of(name: str, value: Any) -> str:
    """Return a value with the unit that its field's name ends in."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(value_of(name, one) for one in value)
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return seconds(value)
    unit = {"mb": " MB", "bytes": " bytes"}.get(name.rpartition("_")[2], "")
    return (f"{value}" if isinstance(value, int) else significant(value)) + unit


def counted(count: int, name: str) -> str:
    """Return a number with its noun: "1 call", "2 calls"."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def seconds(value: float) -> str:
    """Return a time in a fitting unit: "42.4 ms", "1.76 s"."""
    return f"{significant(value)} s" if abs(value) >= 1 else f"{significant(1e3 * value)} ms"


def significant(value: float) -> str:
    """Return a number rounded to three digits, never in the form 1e-05."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"
