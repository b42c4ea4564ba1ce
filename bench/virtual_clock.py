"""A clock for simulations: time stands still while a thread works, and jumps while all wait."""

import heapq
import itertools
import threading
from collections.abc import Callable

from qwen3_omni_neuron.runtime.clock import Clock


class _Sleeper:
    """A thread that waits: for its deadline, for a notification, or for both."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.notified = False


class VirtualClock(Clock):
    """Seconds that nobody waits for.

    It knows the threads it made, and the one that made it. When the last of them begins to wait,
    the time of the earliest deadline has come. Guarded by _guard: every field.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._now = 0.0
        self._working = 1
        self._deadlines: list[tuple[float, int, _Sleeper]] = []
        self._order = itertools.count()  # equal deadlines come in the order they were asked for

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Wait, as an engine does that takes its time."""
        self.enter(sleeper := _Sleeper(), seconds)
        sleeper.awake.wait()

    def condition(self, lock: threading.RLock) -> threading.Condition:
        return _VirtualCondition(self, lock)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                target()
            finally:
                self._stop_working()

        with self._guard:
            self._working += 1
        return threading.Thread(target=run, name=name, daemon=True)

    def enter(self, sleeper: _Sleeper, seconds: float | None) -> None:
        """A thread begins to wait."""
        with self._guard:
            if seconds is not None:
                deadline = self._now + max(0.0, seconds)
                heapq.heappush(self._deadlines, (deadline, next(self._order), sleeper))
        self._stop_working()

    def wake(self, sleeper: _Sleeper) -> None:
        """A thread works again, before its deadline."""
        with self._guard:
            self._wake(sleeper, notified=True)

    def _stop_working(self) -> None:
        with self._guard:
            self._working -= 1
            while not self._working and self._deadlines:
                deadline, _, sleeper = heapq.heappop(self._deadlines)
                if not sleeper.awake.is_set():
                    self._now = deadline
                    self._wake(sleeper, notified=False)

    def _wake(self, sleeper: _Sleeper, notified: bool) -> None:
        if not sleeper.awake.is_set():
            self._working += 1
            sleeper.notified = notified
            sleeper.awake.set()


class _VirtualCondition(threading.Condition):
    def __init__(self, clock: VirtualClock, lock: threading.RLock):
        super().__init__(lock)
        self._clock = clock
        self._sleepers: list[_Sleeper] = []

    def wait(self, timeout: float | None = None) -> bool:
        sleeper = _Sleeper()
        self._sleepers.append(sleeper)
        self._clock.enter(sleeper, timeout)
        held = self._release_save()  # type: ignore[attr-defined]
        sleeper.awake.wait()
        self._acquire_restore(held)  # type: ignore[attr-defined]
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)
        return sleeper.notified

    def notify_all(self) -> None:
        for sleeper in self._sleepers:
            self._clock.wake(sleeper)
        self._sleepers.clear()
