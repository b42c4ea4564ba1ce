"""The caller's end of a request: an iterator over its events, in a thread or in an event loop."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType

from qwen3_omni_neuron.errors import ForkError
from qwen3_omni_neuron.events import Event, Finished, TextDelta
from qwen3_omni_neuron.runtime.buffers import Item
from qwen3_omni_neuron.runtime.joined_events import JoinedEvents
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import LiveRequest, Request

TEXT_DELAY_S = 0.05  # longest delay of text in `SpeechStream.bursts`


class SpeechStream(Iterator[Event], AsyncIterator[Event]):
    """Iterator over a request's events: TextDelta and AudioChunk, and Finished at the end.

    It is read by `for` in a thread, or by `async for` in an event loop, which it does not block.

    The request starts at once. A caller that takes no events stalls its own request, and no other,
    once its output queue is full. `close`, the end of a `with` block or dropping the stream cancels
    the request. An error in any stage is raised by the next event.
    queue_position: position in the queue for a slot when the request came, 0 where it got a slot at
    once. owner: object that must live as long as the stream, the model. later: requests whose
    events continue this stream; each is submitted before the previous one has ended.
    """

    def __init__(
        self, pipeline: Pipeline, request: Request, owner: object, later: Sequence[Request] = ()
    ):
        self._events = JoinedEvents(pipeline, request, later)
        self._owner, self._clock = owner, pipeline.clock
        self.queue_position = self._events.queue_position
        self._done = False

    def __next__(self) -> Event:
        """Return the next event. Raises the error that ended the request, such as a LateError."""
        if self._done:
            raise StopIteration
        try:
            event = None
            while event is None:
                item = self._events.part.wait()
                if item is None and self._done:
                    raise StopIteration  # closed by another thread
                event = self._event_of(item)
        except BaseException:
            self.close()
            raise
        if isinstance(event, Finished):  # never set to False: another thread may have closed it
            self._done = True
        return event

    async def __anext__(self) -> Event:
        """Return the next event as `__next__` does, without blocking the event loop.

        A task that is cancelled while it waits here cancels the request.
        """
        if self._done:
            raise StopAsyncIteration
        try:
            event = None
            while event is None:
                event = self._event_of(await self._next_item())
        except BaseException:
            self.close()
            raise
        if isinstance(event, Finished):
            self._done = True
        return event

    async def bursts(self) -> AsyncIterator[list[Event]]:
        """Yield the events in an event loop, as lists of those that are ready together.

        For a caller whose work for several events is little more than for one. Text is held until
        TEXT_DELAY_S after the last list; audio and the end are never held. A list has at most one
        chunk, which only the end may follow.
        """
        before_s = -math.inf
        while not self._done:
            delay_s = before_s + TEXT_DELAY_S - self._clock.now()
            if delay_s > 0:
                await self._wait(lambda: self._live.output.has_chunk, delay_s)
            event = await anext(self, None)
            if event is None:
                return
            events = [event]
            if isinstance(event, TextDelta):
                events += filter(None, map(self._event_of, self._events.part.take_ready()))
            if self._events.at_end:
                ending = await anext(self, None)
                events += [ending] if ending is not None else []
            yield events
            before_s = self._clock.now()

    @property
    def slot(self) -> int:
        """The request's row in every engine, also after its end; -1 while it is queued."""
        return self._live.slot

    def close(self) -> None:
        """Cancel the request. Its slot is free after at most one more step of each stage."""
        self._done = True
        self._events.close()

    def cancel(self) -> None:
        """Cancel the request; see close."""
        self.close()

    def __enter__(self) -> "SpeechStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(ForkError):  # a forked child leaves its parent's block
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # not where the request was refused
            with suppress(ForkError):
                self.close()

    @property
    def _live(self) -> LiveRequest:
        return self._events.part.live

    def _event_of(self, item: Item | None) -> Event | None:
        """Return the event of an item; None where there is none yet. Each event passes here."""
        return self._events.event_of(item)

    async def _next_item(self) -> Item | None:
        """Wait as `RequestEvents.wait` does. Raises StopAsyncIteration where it was closed."""
        part, since_s = self._events.part, self._clock.now()
        output = part.live.output
        while True:
            with output.changed:
                item, remaining_s = part.take(since_s)
            if remaining_s is None:
                if item is None and self._done:
                    raise StopAsyncIteration
                return item
            await self._wait(lambda: output.has_item, remaining_s)  # a late item ends the request

    async def _wait(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for a change as `changed` does. A task that is cancelled meanwhile cancels it."""
        try:
            await changed(self._live, holds, seconds)
        except BaseException:
            self.close()
            raise


async def changed(live: LiveRequest, holds: Callable[[], bool], seconds: float) -> None:
    """Wait in an event loop until `holds` or a request's end, for `seconds` at most.

    holds: called with the lock held, in the thread that has changed the output.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def end() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake() -> None:
        if live.ended or holds():
            live.output.on_change = None
            with suppress(RuntimeError):  # the loop was closed: nobody waits in it any more
                loop.call_soon_threadsafe(end)

    with live.output.changed:
        if live.ended or holds():
            return
        live.output.on_change = wake
    # Not asyncio.wait_for: before Python 3.12 it loses a cancel that comes as the wait ends.
    deadline = loop.call_later(seconds, end)
    try:
        await woken
    finally:
        deadline.cancel()
        # No other thread sets it; where `wake` has cleared it, the lock is not needed.
        if live.output.on_change is not None:
            with live.output.changed:
                live.output.on_change = None
