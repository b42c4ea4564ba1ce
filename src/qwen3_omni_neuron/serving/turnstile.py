"""Turns in the event loop for work that can wait, so that nothing else waits for all of it."""

import asyncio
from collections import deque


class Turnstile:
    """Lets one task through in each round of the event loop.

    The talker makes the frames of all requests together, so that their chunks come together, too.
    Each takes the event loop a third of a millisecond: a request that comes then, and the first
    chunk of another one, would wait for eight of them. With a turn for each chunk but the first,
    they wait for one. Used in the event loop alone.
    """

    def __init__(self) -> None:
        self._taken = False  # in this round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn. Who came first has the first one."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had come already
                    self._next()
                raise
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        """Give the turn of a new round."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                return
        self._taken = False
