"""Cores on a virtual clock: whoever shares a group of them takes turns, in the order of asking."""

import threading
from dataclasses import dataclass

from testing.virtual_clock import VirtualClock

PLACEMENTS = {
    "shared": {"thinker": "all", "talker": "all", "vocoder": "all"},
    "split": {"thinker": "thinker", "talker": "talker", "vocoder": "vocoder"},
}


@dataclass(frozen=True)
class Span:
    """One call on a group's cores, by the clock."""

    group: str
    call: str
    start_s: float
    end_s: float


class CoreGroup:
    """One lock, handed on in the order it is asked for."""

    def __init__(self, clock: VirtualClock):
        self._clock = clock
        self._changed = clock.condition(threading.RLock())
        self._tickets = self._served = 0

    def hold(self, seconds: float) -> float:
        """Wait for the cores, and have them for so long. Returns when they were had, in s."""
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1
            while ticket != self._served:
                self._changed.wait()
        start_s = self._clock.now()
        self._clock.sleep(seconds)
        with self._changed:
            self._served += 1
            self._changed.notify_all()
        return start_s


class CoreGroups:
    """The groups of a placement: "shared" is one for all stages, "split" one each for thinker,
    talker with its code predictor, and vocoder. spans: every call that was made, in order of their
    ends."""

    def __init__(self, clock: VirtualClock, placement: str):
        self._clock = clock
        self._group_of = PLACEMENTS[placement]
        self._groups = {name: CoreGroup(clock) for name in set(self._group_of.values())}
        self.spans: list[Span] = []

    def run(self, call: str, seconds: float) -> None:
        """A call "stage.name" of an engine, on its stage's cores."""
        group = self._group_of[call.partition(".")[0]]
        start_s = self._groups[group].hold(seconds)
        self.spans.append(Span(group, call, start_s, self._clock.now()))
