"""Limited number of places for work, which owners get in turn."""

import asyncio
import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, field


class FairPlaces:
    """Places for work, given to owners in turn, and within one owner in the order of asking.

    places: number of places. One owner has at most all but one, so that other owners' work need
    not wait for theirs; a single place may go to any owner. Used by one event loop.
    """

    def __init__(self, places: int):
        self._free, self._most_each = places, max(1, places - 1)
        self._count = itertools.count(1)
        self._owners: dict[str, _Owner] = {}

    async def take(self, owner: str) -> None:
        """Wait for a place; the caller must give it back."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owners.setdefault(owner, _Owner()).waiting.append(waiter)
        self._give()
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                self._forget(owner, waiter)
            else:  # the place was given before the task was cancelled
                self.give_back(owner)
            raise

    def take_now(self, owner: str) -> bool:
        """Take a place if one is free for this owner; return whether it is."""
        held = self._owners[owner].held if owner in self._owners else 0
        if not self._free or held >= self._most_each:
            return False
        known = self._owners.setdefault(owner, _Owner())
        known.held, known.served = held + 1, next(self._count)
        self._free -= 1
        return True

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._free += 1
        self._owners[owner].held -= 1
        self._give()
        self._drop_idle(owner)

    def _give(self) -> None:
        """Give the free places to the owners whose turn it is."""
        while self._free:
            able = [o for o in self._owners.values() if o.waiting and o.held < self._most_each]
            if not able:
                return
            owner = min(able, key=lambda o: o.served)  # among equals, the first to ask
            waiter = owner.waiting.popleft()
            if waiter.done():  # it was cancelled, and its task has not run since
                continue
            owner.held, owner.served = owner.held + 1, next(self._count)
            self._free -= 1
            waiter.set_result(None)

    def _forget(self, owner: str, waiter: "asyncio.Future[None]") -> None:
        with contextlib.suppress(KeyError, ValueError):  # `_give` has already removed it
            self._owners[owner].waiting.remove(waiter)
        self._drop_idle(owner)

    def _drop_idle(self, owner: str) -> None:
        known = self._owners.get(owner)
        if known is not None and not known.held and not known.waiting:
            del self._owners[owner]


@dataclass
class _Owner:
    """Work of one owner. served: number of the last place that the owner got, 0 for none."""

    held: int = 0
    served: int = 0
    waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)
