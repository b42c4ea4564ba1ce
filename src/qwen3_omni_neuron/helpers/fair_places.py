"""Limited number of places for work, which owners get in turn."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class _Owner:
    """Work of one owner. served: number of the last place that it got, 0 for none."""

    held: int = 0
    served: int = 0
    waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)


class FairPlaces:
    """Places for work, given to owners in turn, and within one owner in the order of asking.

    places: number of places. One owner has at most all but one, so that other owners' work need
    not wait for theirs; a single place may go to any owner. Used by one event loop.
    """

    def __init__(self, places: int):
        self._free, self._most_each = places, max(1, places - 1)
        self._count = itertools.count(1)
        self._owners: dict[str, _Owner] = {}

    @asynccontextmanager
    async def place(self, owner: str, most_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a place, and keep it in the block.

        most_s: seconds to wait; None: no limit. Raises asyncio.TimeoutError.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        known = self._owners.setdefault(owner, _Owner())
        known.waiting.append(waiter)
        self._give()
        # asyncio.wait_for would lose a cancellation that comes together with the place.
        timer = None if most_s is None else loop.call_later(most_s, _expire, waiter)
        try:
            await waiter
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if waiter.cancelled() or waiter.exception() is not None:
                if waiter in known.waiting:
                    known.waiting.remove(waiter)
            else:  # also where the task was cancelled right after it got the place
                self._free += 1
                known.held -= 1
                self._give()
            if not known.held and not known.waiting and self._owners.get(owner) is known:
                del self._owners[owner]

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


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(asyncio.TimeoutError())
