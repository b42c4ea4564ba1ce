"""A clock for simulations: its time advances only when all threads wait."""

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable

from qwen3_omni_neuron.runtime.stage import Clock


class _Sleeper:
    """A thread that waits for its deadline, a notification or both, and then to be scheduled."""

    def __init__(self) -> None:
        self.turn = threading.Event()
        self.woken = self.notified = False


class VirtualClock(Clock):
    """Virtual time for the threads that it makes, and for the thread that made it.

    One thread works at a time, until it waits; then the threads that it woke work, in that order.
    When all wait, the time jumps to the earliest deadline. So simultaneous events have the same
    order in every run. _guard guards every field.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._now = 0.0
        self._works = True  # whether a thread works
        self._ready: deque[_Sleeper] = deque()  # woken, but not working yet
        self._deadlines: list[tuple[float, int, _Sleeper]] = []
        self._order = itertools.count()  # equal deadlines are met in the order of their requests

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of virtual time."""
        self.enter(sleeper := _Sleeper(), seconds)
        sleeper.turn.wait()

    def condition(self, lock: threading.RLock) -> threading.Condition:
        return _VirtualCondition(self, lock)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        begin = _Sleeper()
        self.wake(begin)

        def run() -> None:
            begin.turn.wait()
            try:
                target()
            finally:
                self._stop_working()

        return threading.Thread(target=run, name=name, daemon=True)

    def enter(self, sleeper: _Sleeper, seconds: float | None) -> None:
        """Let the working thread begin to wait."""
        with self._guard:
            if seconds is not None:
                deadline = self._now + max(0.0, seconds)
                heapq.heappush(self._deadlines, (deadline, next(self._order), sleeper))
        self._stop_working()

    def wake(self, sleeper: _Sleeper) -> None:
        """Let a waiting thread work again, before its deadline."""
        with self._guard:
            self._wake(sleeper, notified=True)
            if not self._works:
                self._next_turn()

    def _stop_working(self) -> None:
        with self._guard:
            self._works = False
            self._next_turn()

    def _next_turn(self) -> None:
        while not self._ready and self._deadlines:
            deadline, _, sleeper = heapq.heappop(self._deadlines)
            if not sleeper.woken:
                self._now = deadline
                self._wake(sleeper, notified=False)
        if self._ready:
            self._works = True
            self._ready.popleft().turn.set()

    def _wake(self, sleeper: _Sleeper, notified: bool) -> None:
        if not sleeper.woken:
            sleeper.woken, sleeper.notified = True, notified
            self._ready.append(sleeper)


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
        sleeper.turn.wait()
        self._acquire_restore(held)  # type: ignore[attr-defined]
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)
        return sleeper.notified

    def notify_all(self) -> None:
        for sleeper in self._sleepers:
            self._clock.wake(sleeper)
        self._sleepers.clear()
