"""The lock of a compiled tree: one compile at a time writes into it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3_omni_neuron.errors import CompileError

LOCK_FILE = ".lock"
# A killed run's worker process holds the lock until it notices that its parent is gone: 0.25 s,
# and longer while an import keeps its watching thread waiting.
WAIT_S = 3.0
_RETRY_S = 0.05


@contextmanager
def tree_lock(tree: Path) -> Iterator[int]:
    """Hold the tree's lock. Yields its descriptor: a process that inherits it holds the lock, too.

    The system releases the lock when the last of these processes ends, in whatever way.
    Raises CompileError where another run holds it, and OSError where the tree can't be written.
    """
    descriptor = os.open(tree / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, tree)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, tree: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode().strip()
                raise CompileError(
                    f"another run{f' (process {holder})' if holder else ''} is compiling into "
                    f"{tree}. Wait for its end, or compile into another folder."
                ) from None
            time.sleep(_RETRY_S)
