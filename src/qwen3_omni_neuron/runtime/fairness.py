"""Fairness between the requests of several owners: turns for slots, for encoders and for prefills.

The owner of a request is named by the caller (option `owner`), such as a server's API key. However
many requests one owner sends, another owner's request waits for one of them at most. Requests of
one owner, and all requests without an owner, go in the order in which they came.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.stage import AnyTask, Task

Owner = str | None

KEPT_S = 10.0  # how long a slot is kept for an owner after its last request came or ended


def in_turn(waiting: Sequence[AnyTask], tasks: Sequence[Task]) -> list[AnyTask]:
    """Sort a stage's waiting tasks: the next is the first of them. tasks: all of the stage.

    The owner with the fewest slots goes first; among these owners, the one that has waited longest
    since its last prefill, or since its request came. So a short prompt of one owner is computed
    between two chunks of another one's long prompt.
    """
    if len(waiting) < 2:
        return list(waiting)
    slots = _slots(task.live for task in tasks)
    since_s: dict[Owner, float] = {}
    for one in waiting:
        since_s.setdefault(one.live.request.options.owner, one.live.request.arrived_s)
    for any_task in tasks:
        owner = any_task.live.request.options.owner
        since_s[owner] = max(since_s.get(owner, -math.inf), any_task.prefilled_s)

    def turn(task: Task) -> tuple[int, float]:
        owner = task.live.request.options.owner
        return slots[owner], since_s[owner]

    return sorted(waiting, key=turn)


class Fairness:
    """Decides who gets the next slot. It remembers as many owners as there are slots.

    kept_until_s: until when a slot is kept free by the last answer of `next`, else infinity.
    """

    def __init__(self, slots: int):
        self._most = slots
        self.kept_until_s = math.inf
        # By owner, the latest last: when its last request came, and when one last ended.
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
        """Return the waiting request that gets a free slot, None where none may.

        It is the first request of the owner with the fewest slots; among these owners, of the one
        that has waited longest since it came or its last request ended. An owner that has a slot
        does not get the last free one while another owner without a slot came within KEPT_S: a slot
        is taken for a whole reply. No slot is kept for requests without an owner, such as the one
        by which a server warms up.
        """
        slots, first = _slots(running), dict[Owner, LiveRequest]()
        for live in waiting:
            first.setdefault(live.request.options.owner, live)
        others = [  # until when a slot is kept for each
            came_s + KEPT_S
            for owner, (came_s, _) in self._seen.items()
            if owner is not None and not slots[owner] and now < came_s + KEPT_S
        ]
        may = [live for owner, live in first.items() if free > 1 or not slots[owner] or not others]
        self.kept_until_s = math.inf if may else max(others, default=math.inf)

        def turn(live: LiveRequest) -> tuple[int, float]:
            owner = live.request.options.owner
            ended_s = self._seen.get(owner, (now, -math.inf))[1]
            return slots[owner], max(live.request.arrived_s, ended_s)

        return min(may, key=turn, default=None)

    def _note(self, owner: Owner, came_s: float, ended_s: float) -> None:
        self._seen.pop(owner, None)
        self._seen[owner] = came_s, ended_s
        if len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]


def _slots(lives: Iterable[LiveRequest]) -> "Counter[Owner]":
    """Return how many slots each owner has, without those that prefill ahead."""
    return Counter(live.request.options.owner for live in lives if not live.request.ahead)
