"""Threads as ranks: the collectives of neuron.graphs.layers, with sums in rank order."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class Ranks:
    """A group of `size` threads. counted: each rank's count of collectives."""

    def __init__(self, size: int):
        self.size = size
        self.counted = [0] * size
        self._barrier = Barrier(size, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def rank(self, number: int) -> "Rank":
        return Rank(self, number)

    def run(self, functions: Sequence[Callable[[], Outputs]]) -> list[Outputs]:
        """Call one function for each rank, concurrently. Returns their results."""

        def call(function: Callable[[], Outputs]) -> Outputs:
            try:
                with torch.no_grad():
                    return function()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(call, functions))

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.counted[rank] += 1
        self._given[rank] = x
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


class Rank:
    """A Group of neuron.graphs.layers over threads."""

    def __init__(self, ranks: Ranks, number: int):
        self._ranks, self._number = ranks, number

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._ranks.exchange(self._number, x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._ranks.exchange(self._number, x), -1)
