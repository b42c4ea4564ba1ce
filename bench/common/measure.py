"""A stopwatch, and what is made of its times."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def repeated(function: Callable[[], Any], repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each call, after some that are not counted."""
    for _ in range(warm_up):
        function()
    return [timed(function) for _ in range(repeats)]


def median_row(seconds: Sequence[float]) -> dict[str, Any]:
    """What a row says of the same call, repeated."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }
