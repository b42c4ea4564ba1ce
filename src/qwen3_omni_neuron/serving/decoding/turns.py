"""Places that several owners take turns in."""

import asyncio
import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, field


class Turns:
    """Places for work, given to owners in turn, and within one owner in the order of asking.

    places: how many there are. One owner has at most all but one of them, so that others' work
    does not wait for his alone; he may have the only one. Used by one event loop.
    """

    def __init__(self, places: int):
        self._free, self._most_each = places, max(1, places - 1)
        self._count = itertools.count(1)
        self._owners: dict[str, _Owner] = {}

    async def take(self, owner: str) -> None:
        """Wait for a place, which is to be given back."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owners.setdefault(owner, _Owner()).waiting.append(waiter)
        self._give()
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                self._forget(owner, waiter)
            else:  # it was given, and then the task was cancelled
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._free += 1
        self._owners[owner].held -= 1
        self._give()
        self._drop_idle(owner)

    def _give(self) -> None:
        """Give the places that are free to those whose turn it is."""
        while self._free:
            able = [o for o in self._owners.values() if o.waiting and o.held < self._most_each]
            if not able:
                return
            owner = min(able, key=lambda o: o.served)  # of equals the one that asked first
            waiter = owner.waiting.popleft()
            if waiter.done():  # cancelled, and its task has not run since
                continue
            owner.held, owner.served = owner.held + 1, next(self._count)
            self._free -= 1
            waiter.set_result(None)

    def _forget(self, owner: str, waiter: "asyncio.Future[None]") -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was passed over already
            self._owners[owner].waiting.remove(waiter)
        self._drop_idle(owner)

    def _drop_idle(self, owner: str) -> None:
        known = self._owners.get(owner)
        if known is not None and not known.held and not known.waiting:
            del self._owners[owner]


@dataclass
class _Owner:
    """Work of one owner. served: number of the last place that was given to it; 0: none."""

    held: int = 0
    served: int = 0
    waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)
