"""Places for work that owners acquire in turn."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairPlaces:
    """Places for work, acquired by owners in turn, and by one owner's tasks in order of arrival.

    places: their number. One owner gets all but one at most; a single place may go to any owner.
    Used by one event loop.
    """

    def __init__(self, places: int):
        self._free, self._most_each = places, max(1, places - 1)
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._held = Counter[str]()
        self._count = itertools.count(1)
        self._served = Counter[str]()  # by owner: number of its last place, or 0

    @asynccontextmanager
    async def place(self, owner: str, most_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a place, and keep it during the block.

        most_s: seconds to wait; None: no limit. Raises asyncio.TimeoutError.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((owner, waiter))
        self._give()
        # asyncio.wait_for would lose a cancellation that arrives with the place.
        timer = None if most_s is None else loop.call_later(most_s, _expire, waiter)
        try:
            await waiter
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if waiter.cancelled() or waiter.exception() is not None:
                self._waiting.remove((owner, waiter))
            else:  # also if the task was cancelled after it got the place
                self._free += 1
                self._held[owner] -= 1
                self._give()
            if not self._held[owner] and all(other != owner for other, _ in self._waiting):
                del self._held[owner], self._served[owner]

    def _give(self) -> None:
        while self._free:
            able = [
                (owner, waiter)
                for owner, waiter in self._waiting
                if self._held[owner] < self._most_each and not waiter.done()
            ]
            if not able:
                return
            owner, waiter = min(able, key=lambda one: self._served[one[0]])  # first come
            self._waiting.remove((owner, waiter))
            self._held[owner] += 1
            self._served[owner] = next(self._count)
            self._free -= 1
            waiter.set_result(None)


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(asyncio.TimeoutError())
