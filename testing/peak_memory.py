"""Peak memory of a block."""

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
    """Peak memory of a block. nbytes: growth of resident bytes since the block's beginning."""

    nbytes = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch this process every millisecond until the block ends."""
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
    """Return the resident bytes of this process."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
