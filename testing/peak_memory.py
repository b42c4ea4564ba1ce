"""Peak memory of a process (for scripts in their own process) and of a call's tensors."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def peak_tensor_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call's own tensors take at one time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    del kept
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most
