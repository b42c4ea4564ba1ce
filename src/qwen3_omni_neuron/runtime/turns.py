"""Turns of the requests of several owners: for slots, and for the thinker's prefill.

An owner is whoever a caller says that a request is from (option `owner`), such as a server's API
key. However many requests one owner sends, those of another wait for one of them at the most. Those
of one owner go in the order in which they came, and so do all where nobody says.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from qwen3_omni_neuron.runtime.request import LiveRequest

Entry = TypeVar("Entry")
Owner = str | None

KEPT_S = 10.0  # that a slot is kept for an owner who has come, or whose request has ended


def fewest_slots_first(
    waiting: Iterable[Entry], live_of: Callable[[Entry], LiveRequest], lives: Iterable[LiveRequest]
) -> list[Entry]:
    """Return those that wait, by how many slots their owners have. lives: all that have a slot."""
    slots = _slots(lives)
    return sorted(waiting, key=lambda entry: slots[live_of(entry).request.owner])


class Turns:
    """Decides who gets the next slot. It remembers as many owners as there are slots."""

    def __init__(self, slots: int):
        self._most = slots
        # By owner, who came last at the end: when that was, and when a request of it has ended.
        self._seen: dict[Owner, tuple[float, float]] = {}

    def came(self, owner: Owner, now: float) -> None:
        """Note that a request of an owner has come."""
        self._note(owner, now, self._seen.get(owner, (now, -math.inf))[1])

    def ended(self, owner: Owner, now: float) -> None:
        """Note that a request of an owner has ended."""
        self._note(owner, now, now)

    def next(
        self, waiting: Iterable[LiveRequest], running: Iterable[LiveRequest], free: int, now: float
    ) -> LiveRequest | None:
        """Return which of those that wait gets one of the free slots, None where none may.

        It is the first of the owner who has fewest slots, then of the one who has waited longest
        since it came or its last request ended. An owner who has a slot does not get the last one
        while another, who has none, came within KEPT_S: a slot is taken for a whole reply.
        """
        slots, first = _slots(running), dict[Owner, LiveRequest]()
        for live in waiting:
            first.setdefault(live.request.owner, live)
        others = {
            owner
            for owner, (came_s, _) in self._seen.items()
            if not slots[owner] and now - came_s <= KEPT_S
        }
        may = [live for owner, live in first.items() if free > 1 or not slots[owner] or not others]

        def turn(live: LiveRequest) -> tuple[int, float]:
            owner = live.request.owner
            ended_s = self._seen.get(owner, (now, -math.inf))[1]
            return slots[owner], max(live.request.arrived_s, ended_s)

        return min(may, key=turn, default=None)

    def _note(self, owner: Owner, came_s: float, ended_s: float) -> None:
        self._seen.pop(owner, None)
        self._seen[owner] = came_s, ended_s
        if len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]


def _slots(lives: Iterable[LiveRequest]) -> "Counter[Owner]":
    """Return how many slots each owner has, but those of prompts that nobody waits for yet."""
    return Counter(live.request.owner for live in lives if not live.request.warm_up)
