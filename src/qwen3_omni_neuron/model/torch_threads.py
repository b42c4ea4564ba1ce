"""The number of threads that torch's operations use in this thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch work on this thread alone.

    Its threads wait for each other in a loop that keeps their cores busy: small operations take many
    times longer with them where other threads work, too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
