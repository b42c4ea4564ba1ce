"""The number of threads of torch's operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch work on this thread alone.

    Its threads spin while waiting for each other: small operations are far slower beside other
    work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
