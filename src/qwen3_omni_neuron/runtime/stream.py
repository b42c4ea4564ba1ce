"""The caller's end of a request: its events one by one, the text in whole characters."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import numpy as np

from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    SpeechResult,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.runtime.buffers import Item, TextEnd
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from qwen3_omni_neuron.runtime.stop_strings import INCOMPLETE

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
        self._live, self.queue_position = pipeline.submit(request)
        self._pipeline, self._owner = pipeline, owner
        self._clock = pipeline.clock
        self._text = TextStream(request.codec.decode)
        self._texts: list[str] = []
        self._chunks: list[AudioChunk] = []
        self._parts = [self._live]  # requests whose events were taken, the current one last
        self._first_sample = 0  # index in the stream of the current part's first sample
        self._later = deque(later)
        self._next: LiveRequest | None = None
        self._done = False
        self._submit_next()

    def __next__(self) -> Event:
        """Return the next event. Raises the error that ended the request, such as a LateError."""
        if self._done:
            raise StopIteration
        try:
            event = self._next_event()
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
                event = self._event_of(await self._next_item_async())
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
                events += filter(None, map(self._event_of, self._items_ready()))
            if self._at_end():
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
        self._pipeline.cancel(self._live)
        if self._next is not None:
            self._pipeline.cancel(self._next)

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
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # not where the request was refused
            self.close()

    def _next_event(self) -> Event:
        while True:
            item = self._next_item()
            if item is None and self._done:
                raise StopIteration  # closed by another thread
            event = self._event_of(item)
            if event is not None:
                return event

    def _event_of(self, item: Item | None) -> Event | None:
        """Return the event of an item; None where it completes no character yet."""
        if item is None:
            return None if self._go_on() else Finished(self._result())
        if isinstance(item, AudioChunk):
            chunk = self._joined(item)
            self._chunks.append(chunk)
            return chunk
        delta = self._text.finish() if isinstance(item, TextEnd) else self._text.push(item)
        if not delta[1]:
            return None
        self._texts.append(delta[0])
        return TextDelta(*delta)

    def _joined(self, chunk: AudioChunk) -> AudioChunk:
        """Return a chunk of this part with its place in the whole stream.

        Each part's audio is shorter than its frames by the vocoder's latency, 23 ms. Silence of
        that length is put between two parts, so that the stream is as long as its frames.
        """
        if len(self._parts) == 1:
            return chunk
        samples, first_sample = chunk.samples, chunk.first_sample + self._first_sample
        gap = self._pipeline.latency_samples if self._first_sample else 0
        if chunk.first_sample:
            first_sample += gap
        else:
            samples = np.concatenate((np.zeros(gap, np.float32), samples))
        return replace(chunk, samples=samples, first_sample=first_sample)

    def _go_on(self) -> bool:
        """Go on with the next request, where there is one, and submit the one after it."""
        if self._next is None:
            return False
        self._live = self._next
        self._parts.append(self._live)
        self._first_sample = sum(len(chunk.samples) for chunk in self._chunks)
        request = self._live.request
        before = "" if request.written is None else request.written.before
        self._text = TextStream(request.codec.decode, before)
        self._submit_next()
        return True

    def _submit_next(self) -> None:
        self._next = None
        if self._later:
            request = replace(self._later.popleft(), arrived_s=self._clock.now())
            self._next, _ = self._pipeline.submit(request, after=self._live)
        if self._done:  # closed by another thread meanwhile
            self.close()

    def _next_item(self) -> Item | None:
        """Wait for the next item of the output. Returns None after the last one."""
        changed, since_s = self._live.output.changed, self._clock.now()
        with changed:
            while True:
                item, remaining_s = self._take(since_s)
                if remaining_s is None:
                    return item
                changed.wait(remaining_s)

    async def _next_item_async(self) -> Item | None:
        """Do `_next_item` in an event loop. Raises StopAsyncIteration where it was closed."""
        output, since_s = self._live.output, self._clock.now()
        while True:
            with output.changed:
                item, remaining_s = self._take(since_s)
            if remaining_s is None:
                if item is None and self._done:
                    raise StopAsyncIteration
                return item
            await self._wait(lambda: output.has_item, remaining_s)  # a late item ends the request

    async def _wait(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait in an event loop until `holds` or the request's end, for `seconds` at most.

        holds: called with the lock held, in the thread that has changed the output.
        """
        loop, live = asyncio.get_running_loop(), self._live
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
        except BaseException:  # the task was cancelled
            self.close()
            raise
        finally:
            deadline.cancel()
            # No other thread sets it; where `wake` has cleared it, the lock is not needed.
            if live.output.on_change is not None:
                with live.output.changed:
                    live.output.on_change = None

    def _items_ready(self) -> list[Item]:
        """Take the items that are ready, up to a chunk. The next wait handles end and error."""
        items: list[Item] = []
        with self._live.output.changed:
            while self._live.error is None and not (items and isinstance(items[-1], AudioChunk)):
                item = self._live.output.take()
                if item is None:
                    break
                items.append(item)
        return items

    def _at_end(self) -> bool:
        """Return whether the last request has ended well, and all of its items were taken."""
        live = self._live
        with live.output.changed:
            ended = live.ended and live.error is None and not live.output.has_item
        return ended and self._next is None

    def _take(self, since_s: float) -> tuple[Item | None, float | None]:
        """Take an item if there is one. The lock is held.

        since_s: when the wait began. Returns the item, None after the last one, and no time; or
        None and the time until the deadline, where the caller has to wait. Raises the error that
        ended the request.
        """
        live = self._live
        while True:
            if live.error is not None:
                raise live.error
            item = live.output.take()
            if item is not None or live.ended:
                return item, None
            remaining_s = live.deadline_s(since_s) - self._clock.now()
            if remaining_s > 0:
                return None, remaining_s
            live.end(live.late())

    def _result(self) -> SpeechResult:
        parts, frames = self._parts, [codes for part in self._parts for codes in part.codes]
        # numpy's concatenate would release the interpreter lock, and delay the reply's end.
        audio = np.frombuffer(
            bytearray().join(chunk.samples.data for chunk in self._chunks), np.float32
        )
        codes = np.frombuffer(bytearray().join(codes.data for codes in frames), np.int64)
        cut = any(part.talker_finish == "length" for part in parts)
        return SpeechResult(
            text="".join(self._texts),
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            codes=codes.reshape(len(frames), self._pipeline.code_groups),
            audio=audio,
            sample_rate=SAMPLE_RATE,
            thinker_finish_reason=self._live.thinker_finish,
            talker_finish_reason="length" if cut else self._live.talker_finish,
            timings=self._timings(len(audio) / SAMPLE_RATE),
            seed=parts[0].seed,
        )

    def _timings(self, audio_s: float) -> Timings:
        parts, live = self._parts, self._parts[0]
        times, arrived_s = live.timestamps, live.request.arrived_s
        assert times.admitted_s is not None and times.first_token_s is not None
        firsts = [part.timestamps.first_sample_s for part in parts]
        lasts = [part.timestamps.last_sample_s for part in parts]
        first = next((first_s for first_s in firsts if first_s is not None), None)
        last = next((last_s for last_s in reversed(lasts) if last_s is not None), None)
        return Timings(
            queued_s=times.admitted_s - arrived_s,
            ttft_s=times.first_token_s - arrived_s,
            ttfb_s=None if first is None else first - arrived_s,
            total_s=self._clock.now() - arrived_s,
            audio_s=audio_s,
            rtf=None if last is None else (last - arrived_s) / audio_s,
            prompt_tokens=0 if live.request.written else len(live.request.prompt),
            reused_tokens=live.reused_rows,
            text_tokens=sum(len(part.token_ids) for part in parts),
            frames=sum(len(part.codes) for part in parts),
            prompt_audio_tokens=live.request.prompt.audio_tokens,
            prompt_image_tokens=live.request.prompt.image_tokens,
        )


class TextStream:
    """Decoder of a growing reply, which returns whole characters.

    A character may be spelled by several tokens. decode: token ids to text, special tokens skipped.
    before: text that the first returned text begins with.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: str = ""):
        self._decode, self._before = decode, before
        self._held: list[int] = []

    def push(self, token_id: int) -> tuple[str, list[int]]:
        """Add a token. Returns the text that is now complete and its ids; both may be empty."""
        self._held.append(token_id)
        text = self._decode(self._held)
        if text.endswith(INCOMPLETE):
            return "", []
        return self._release(text)

    def finish(self) -> tuple[str, list[int]]:
        """Return the text of the tokens that are still held, incomplete characters included."""
        return self._release(self._decode(self._held)) if self._held else ("", [])

    def _release(self, text: str) -> tuple[str, list[int]]:
        ids, self._held = self._held, []
        text, self._before = self._before + text, ""
        return text, ids
