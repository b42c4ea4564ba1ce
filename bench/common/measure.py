"""Times of repeated calls, and calls in a process of their own."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def nothing() -> None:
    """Do nothing."""


def repeated(
    function: Callable[[], Any], repeats: int, beside: Callable[[], None] = nothing
) -> list[float]:
    """Return the seconds of each call, after one call that is not counted.

    beside: called after each.
    """
    seconds = []
    for _ in range(1 + repeats):
        seconds.append(timed(function))
        beside()
    return seconds[1:]


def in_turn(functions: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Call the functions in turn, every one `repeats` times; return the seconds of each one's."""
    rounds = [[timed(function) for function in functions] for _ in range(repeats)]
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def median_row(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one repeated call for a row."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of a module in a process of its own, to measure its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
