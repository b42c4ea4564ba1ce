"""The clock of the runtime: time, waiting and threads, which a simulation can replace."""

import threading
import time
from collections.abc import Callable


class Clock:
    """Real time. A subclass may advance its own time whenever all of its threads wait."""

    def now(self) -> float:
        """Return seconds since a fixed moment."""
        return time.perf_counter()

    def condition(self, lock: threading.RLock) -> threading.Condition:
        """Return a condition variable over a lock."""
        return threading.Condition(lock)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a thread, not started yet, that waits by this clock."""
        return threading.Thread(target=target, name=name, daemon=True)
