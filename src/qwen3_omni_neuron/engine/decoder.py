"""A decoder as an engine uses it, on whatever it runs: a line of its KV cache a slot."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Numbers:
    """Integers as tensors int64 [1], ready made: views on a count from 0 up to `limit`."""

    def __init__(self, limit: int):
        self._count = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        return self._count[number : number + 1]


class DecoderSlots(Protocol):
    """A decoder with a KV cache line a slot, on whatever it runs."""

    slots: int
    context_length: int

    def prefill(self, slot: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0. rows: [S, hidden]; positions: float32 [3, S]. Returns
        logits [1, vocab] and the post-norm hidden state [1, hidden] of the last row."""
        ...

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row [n, hidden] to each slot. Returns logits [n, vocab] and post-norm hidden
        states [n, hidden]."""
        ...
