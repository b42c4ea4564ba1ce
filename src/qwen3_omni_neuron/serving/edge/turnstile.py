"""Limit of one task a round of the event loop for work that can wait."""

import asyncio
from collections import deque


class Turnstile:
    """Admits one task in each round of the event loop.

    The talker makes the frames of all requests together, so that their chunks arrive together, too.
    Each chunk takes the event loop a third of a millisecond: a new request, or the first chunk of
    another one, would wait for eight chunks. If each chunk but a request's first waits for a turn,
    they wait for one. Used in the event loop alone.
    """

    def __init__(self) -> None:
        self._taken = False  # whether a task has had this round's turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn. Turns are given in the order of asking."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn was already given: pass it on
                    self._next()
                raise
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        """Give the turn of a new round to the next task."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                return
        self._taken = False
