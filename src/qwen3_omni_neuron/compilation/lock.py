"""One run at a time for a compiled tree."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3_omni_neuron.errors import CompileError

LOCK_FILE = ".lock"
# A run that was killed has a worker that still holds the lock until it has noticed: 0.25 s, and
# what loading a library keeps its other threads waiting.
PATIENCE_S = 3.0
_RETRY_S = 0.05


@contextmanager
def tree_lock(tree: Path) -> Iterator[int]:
    """Hold the tree. Yields the lock's descriptor: a process that inherits it holds the tree, too.

    The system lets go of it when the last of them ends, in whatever way.
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
    deadline = time.monotonic() + PATIENCE_S
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
