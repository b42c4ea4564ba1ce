"""Time, and waiting for others: one place, so that a simulation can put its own in."""

import threading
import time
from collections.abc import Callable


class Clock:
    """The real one. A subclass may let time run by itself while all of its threads wait."""

    def now(self) -> float:
        """Seconds since some moment in the past."""
        return time.perf_counter()

    def condition(self, lock: threading.RLock) -> threading.Condition:
        """A condition variable over a lock."""
        return threading.Condition(lock)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread, not started yet, that waits by this clock."""
        return threading.Thread(target=target, name=name, daemon=True)
