"""Rows of one call cut into the batches that were compiled."""

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor


def batch_of(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes`, ascending, that holds `rows`; the largest where none does."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def batches(rows: int, sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Which rows each call takes, and the batch that they are padded to: 9 rows in (1, 4) are 4,
    4 and 1."""
    start = 0
    while start < rows:
        size = batch_of(rows - start, sizes)
        stop = min(start + size, rows)
        yield slice(start, stop), size
        start = stop


def pad_rows(x: Tensor, size: int, value: float = 0) -> Tensor:
    """x [n, ...] -> [size, ...], filled up with `value`."""
    if len(x) == size:  # even no padding would be a copy
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, size - len(x)), value=value)
