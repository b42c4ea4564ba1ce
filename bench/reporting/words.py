"""How figures are written in a report: with their unit, and whether more of it is better."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

NOTHING = "-"  # where a value would stand
STATISTICS = ("count", "mean", "p50", "p90", "p95", "p99")
_NAMES = {"ttft_s": "TTFT", "itl_s": "ITL", "ttfb_s": "TTFB", "rtf": "RTF"}
_NAMES |= {"wer": "WER", "cer": "CER", "audio_s": "audio"}
# Of metrics.summarize.
_GROUPS = {"all": "all requests", "complete": "complete replies", "truncated": "truncated replies"}
# Lengths of what was asked for or answered: neither way is better.
_LENGTHS = {"wall_s", "audio_s"}
_LESS_IS_BETTER = {"rtf", "wer", "cer", "underruns", "requests_with_underruns", "failed_requests"}

Path = tuple[str, ...]


def leaves(summary: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of nested dicts, with the names that lead to it."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def measured_name(path: Path) -> str:
    """What a value is of: "ttfb_s" for the path all, ttfb_s, p50; "count" for their number."""
    if path[-1] in STATISTICS and path[-1] != "count" and len(path) > 1:
        return path[-2]
    return path[-1]


def less_is_better(path: Path) -> bool | None:
    """True, False where more is, None where neither is."""
    name = measured_name(path)
    if name.endswith("_per_s"):
        return False
    if name in _LENGTHS:
        return None
    return True if name in _LESS_IS_BETTER or name.endswith(("_s", "_mb")) else None


def title_of(path: Path) -> str:
    """The names that lead to a value, the last one first: "TTFB p50, all requests"."""
    *above, last = path
    is_statistic = last in STATISTICS and above
    first = f"{name_of(above.pop())} {last}" if is_statistic else name_of(last)
    return ", ".join([first, *(_GROUPS.get(name, name_of(name)) for name in reversed(above))])


def name_of(name: str) -> str:
    """A field's name without its unit, which stands with the value."""
    if name in _NAMES:
        return _NAMES[name]
    if name.endswith("_per_s"):
        return f"{name_of(name.removesuffix('_per_s'))} a second"
    for unit in ("_s", "_mb", "_bytes"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def value_of(name: str, value: Any) -> str:
    """A value with the unit that its field's name ends in."""
    if value is None:
        return NOTHING
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


def seconds(value: float) -> str:
    """ "42.4 ms", "1.76 s"."""
    return f"{significant(value)} s" if abs(value) >= 1 else f"{significant(1e3 * value)} ms"


def significant(value: float, digits: int = 3) -> str:
    """Rounded to so many digits, never in the form 1e-05."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def scale_of(longest_s: float) -> tuple[float, str]:
    """What seconds are multiplied by on an axis, and its unit."""
    return (1.0, "s") if longest_s >= 1 else (1e3, "ms")
