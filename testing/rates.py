"""Calls of torch that read or multiply numbers, to measure the rates of this machine.

Torch multiplies by its BLAS or by oneDNN, whichever is faster: on an AMD processor MKL reaches half
of what oneDNN does.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class MachineRates:
    """Bytes that are read in a second, and multiply-adds in float32, by so many threads."""

    bytes_per_s: float
    multiply_adds_per_s: float
    threads: int


def reads(threads: int, elements: int) -> list[Call]:
    """Make a call for each thread that reads an array of its own: 4 bytes an element."""
    return [partial(torch.sum, torch.ones(elements)) for _ in range(threads)]


@contextmanager
def one_thread_each(calls: Sequence[Call]) -> Iterator[Call]:
    """Make one function of several: each runs in a thread of its own, and all are waited for."""
    # Each Python thread has its own number of torch's threads: here each works alone.
    with ThreadPoolExecutor(len(calls), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield partial(_together, pool, calls)


@contextmanager
def products(threads: int, size: int) -> Iterator[list[Call]]:
    """Make calls that each multiply two matrices [size, size]; torch has so many threads inside."""
    left, right, product = (torch.ones(size, size) for _ in range(3))
    calls: list[Call] = [partial(torch.mm, left, right, out=product)]
    if torch.backends.mkldnn.is_available():
        calls.append(partial(torch.ops.mkldnn._linear_pointwise, left, right, None, "none", [], ""))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield calls
    finally:
        torch.set_num_threads(before)


def _together(pool: ThreadPoolExecutor, calls: Sequence[Call]) -> None:
    for call in [pool.submit(call) for call in calls]:
        call.result()
