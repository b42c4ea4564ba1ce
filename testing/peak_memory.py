"""How much memory a process takes beside what it had: for scripts in a process of their own."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STATM = Path("/proc/self/statm")
needs_proc = pytest.mark.skipif(not STATM.exists(), reason="reads /proc, which Linux has")


class Peak:
    """nbytes: the most that was resident above what was at the beginning."""

    nbytes = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Looks every millisecond until the block ends."""
    peak, before, done = Peak(), resident(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak.nbytes = max(peak.nbytes, resident() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
