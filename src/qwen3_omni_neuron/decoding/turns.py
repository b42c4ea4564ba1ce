"""Places that several owners take turns in."""

import asyncio
from collections import Counter, deque


class Turns:
    """Places for work, given to owners in turn, and within one owner in the order of asking.

    places: how many there are. One owner has at most all but one of them, so that another's work
    never waits for his alone; he may have the only one. Used by one event loop.
    """

    def __init__(self, places: int):
        self._free, self._most_each = places, max(1, places - 1)
        self._held: Counter[str] = Counter()
        # The owner whose turn is next comes first. No owner is without a waiter.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, owner: str) -> None:
        """Wait for a place, which is to be given back."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._give()
        try:
            await waiter
        except BaseException:
            if waiter.cancelled():
                self._forget(owner, waiter)
            elif waiter.exception() is None:  # it was given, and then the task was cancelled
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._give()

    def refuse(self, error: Exception) -> None:
        """Make all that wait raise an error."""
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)

    def _give(self) -> None:
        """Give the places that are free to those whose turn it is."""
        while self._free:
            allowed = (o for o in self._waiting if self._held[o] < self._most_each)
            owner = next(allowed, None)
            if owner is None:
                return
            waiters = self._waiting.pop(owner)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[owner] = waiters  # behind the others
            if waiter.done():  # cancelled, and its task has not run since
                continue
            self._free -= 1
            self._held[owner] += 1
            waiter.set_result(None)

    def _forget(self, owner: str, waiter: "asyncio.Future[None]") -> None:
        waiters = self._waiting.get(owner)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[owner]
