"""Threads that read requests and write long answers, shared fairly by owners."""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from qwen3_omni_neuron.prompt.pauses import PAUSE

Result = TypeVar("Result")
READERS = 4  # turns at a time
_THREADS = 32  # including paused readers
_PIECE_S = 0.002  # between checks whether another owner waits
# Meanwhile the event loop and the stages, which take the interpreter lock often, run undisturbed.
_REST_S = 0.004


class LeftError(Exception):
    """The client left while its request was read."""


class Readers:
    """Threads that read requests, a few at a time. A lock guards all fields.

    While others have requests, an owner has one turn, with rests between pieces. Long work calls
    `pause`, which raises if its client has left, and waits while another owner is next.
    """

    def __init__(self, has_others: Callable[[str], bool]):
        """has_others: returns whether another owner has requests."""
        self._has_others = has_others
        self._pool = ThreadPoolExecutor(_THREADS, "serving")
        self._lock = threading.Lock()
        self._taken = Counter[str]()
        # Waiting owners, in the order of their last turn.
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    async def run(self, owner: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread, in the owner's turn.

        If the task is cancelled, the call ends at its next pause, or its result is closed.
        """
        turn = self._wait(owner)
        try:
            if not turn.done():
                await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it was given meanwhile
                self._leave(owner)
            raise
        left = threading.Event()
        try:
            future = self._pool.submit(self._call, owner, left, call, arguments)
        except RuntimeError:  # no thread could start; the pool keeps the call
            left.set()
            self._leave(owner)
            raise
        future.add_done_callback(lambda _: self._leave(owner))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            left.set()
            future.add_done_callback(_close_result)
            raise

    @contextmanager
    def turn(self, owner: str) -> Iterator[None]:
        """Wait in this thread for a turn, which the block's pauses don't end."""
        self._wait(owner).result()
        try:
            with self._pausing(owner, threading.Event()):
                yield
        finally:
            self._leave(owner)

    def close(self) -> None:
        """End the threads. Abandon one whose call hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(
        self,
        owner: str,
        left: threading.Event,
        call: Callable[..., Result],
        arguments: tuple[Any, ...],
    ) -> Result:
        with self._pausing(owner, left):
            return call(*arguments)

    @contextmanager
    def _pausing(self, owner: str, left: threading.Event) -> Iterator[None]:
        looked_s = time.perf_counter()

        def pause() -> None:
            nonlocal looked_s
            if left.is_set():
                raise LeftError
            if time.perf_counter() - looked_s > _PIECE_S:
                if self._gives_way(owner):
                    turn = self._wait(owner, first=True)
                    self._leave(owner)
                    turn.result()
                elif self._has_others(owner):
                    time.sleep(_REST_S)
                looked_s = time.perf_counter()

        before = PAUSE.set(pause)
        try:
            yield
        finally:
            PAUSE.reset(before)

    def _gives_way(self, owner: str) -> bool:
        with self._lock:
            if self._taken[owner] > 1 and self._has_others(owner):
                return True
            full = self._taken.total() >= READERS
            return full and any(not self._taken[other] for other in self._waiting)

    def _wait(self, owner: str, first: bool = False) -> "Future[None]":
        """Return a future, done at the owner's turn. first: before its others."""
        turn = Future[None]()
        with self._lock:
            waiting = self._waiting.setdefault(owner, deque())
            (waiting.appendleft if first else waiting.append)(turn)
            self._give()
        return turn

    def _leave(self, owner: str) -> None:
        with self._lock:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]
            self._give()

    def _give(self) -> None:
        while self._taken.total() < READERS:
            owner = next(filter(self._may, self._waiting), None)
            if owner is None:
                return
            waiting = self._waiting.pop(owner)
            turn = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            if turn.set_running_or_notify_cancel():
                self._taken[owner] += 1
                turn.set_result(None)

    def _may(self, owner: str) -> bool:
        alone = len(self._waiting) == 1 and not self._has_others(owner)
        return alone or owner not in self._taken


def _close_result(future: "Future[Any]") -> None:
    if not future.cancelled() and future.exception() is None:
        with suppress(AttributeError):
            future.result().close()
