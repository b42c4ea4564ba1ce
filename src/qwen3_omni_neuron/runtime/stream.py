"""The caller's end of a request: an iterator over its events, in a thread or in an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import numpy as np

from qwen3_omni_neuron.errors import ForkError
from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    FinishReason,
    SpeechResult,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.runtime.buffers import Item, TextEnd
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from qwen3_omni_neuron.runtime.stop_strings import INCOMPLETE


class SpeechStream(Iterator[Event], AsyncIterator[Event]):
    """Iterator over a request's events: TextDelta and AudioChunk, and Finished at the end.

    It is read by `for` in a thread, or by `async for` in an event loop, which it does not block.
    `with` and `async with` close it at their end.

    The request starts at once. A caller that takes no events stalls its own request, and no other,
    once its output queue is full. `close`, the end of a `with` block or dropping the stream cancels
    the request. An error in any stage is raised by the next event.
    queue_position: position in the queue for a slot when the request came, 0 where it got a slot at
    once. prompt_tokens: number of tokens of its prompt. keeps_audio: whether the result has the
    audio; False: a chunk is not kept once it was passed on. owner: object that must live as long as
    the stream, the model. later: requests whose events continue this stream, such as the pieces of
    a long text; each is submitted before the previous one has ended, and takes its slot.
    """

    def __init__(
        self, pipeline: Pipeline, request: Request, owner: object, later: Sequence[Request] = ()
    ):
        self._owner, self._pipeline, self._clock = owner, pipeline, pipeline.clock
        self.prompt_tokens, self.keeps_audio = len(request.prompt), True
        self._live, self.queue_position = pipeline.submit(request)  # the request that is read now
        self._done = False
        self._lives = [self._live]  # requests whose events were taken, the current one last
        self._next: LiveRequest | None = None
        self._later = deque(later)
        self._decoder = TextStream(request.codec.decode)
        self._texts: list[str] = []
        self._told = 0  # tokens of the current request's events
        self._chunks: list[AudioChunk] = []  # where the audio is kept
        self._samples = 0  # of all chunks
        self._first_sample = 0  # index in the reply of the current request's first sample
        self._submit_next()

    def __next__(self) -> Event:
        """Return the next event. Raises the error that ended the request, such as a LateError."""
        since_s = self._clock.now()
        while not self._done:
            try:
                changed = self._live.output.changed
                with changed:
                    item, left_s = self._take(since_s)
                    if left_s is not None:
                        changed.wait(left_s)
                        continue
                event = self._next_event(item)
            except BaseException:
                self.close()
                raise
            if event is not None:
                return event
        raise StopIteration

    async def __anext__(self) -> Event:
        """Return the next event as `__next__` does, without blocking the event loop.

        A task that is cancelled while it waits here cancels the request.
        """
        since_s = self._clock.now()
        while not self._done:
            try:
                with self._live.output.changed:
                    item, left_s = self._take(since_s)
                if left_s is not None:  # a late item ends the request
                    await self._changed(left_s)
                    continue
                event = self._next_event(item)
            except BaseException:
                self.close()
                raise
            if event is not None:
                return event
        raise StopAsyncIteration

    async def ready(self, delay_s: float) -> list[Event]:
        """Wait for the next event, and return it with those that are ready then.

        For a caller whose work for several events is little more than for one. Text is held for
        delay_s to come with more of it; audio and the end are not. The list has at most one chunk,
        which only the end may follow. Raises StopAsyncIteration after the end.
        """
        if delay_s > 0 and not self._done:
            try:
                await self._changed(delay_s, chunk=True)
            except BaseException:
                self.close()
                raise
        events = [await anext(self)]
        if isinstance(events[0], TextDelta):
            events += filter(None, map(self._event_of, self._take_ready()))
        if self._at_end:
            with suppress(StopAsyncIteration):  # another thread may have closed it
                events.append(await anext(self))
        return events

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
        with suppress(ForkError):  # a forked child leaves its parent's block
            self.close()

    async def __aenter__(self) -> "SpeechStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)  # which waits for nothing

    def __repr__(self) -> str:
        where = "queued" if self.slot < 0 else f"in slot {self.slot}"
        state = "ended" if self._done else where
        return f"<{type(self).__name__}: {self.prompt_tokens} prompt tokens, {state}>"

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # not where the request was refused
            with suppress(ForkError):
                self._pipeline.call_without_waiting(self.close)

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
            left_s = live.deadline_s(since_s) - self._clock.now()
            if left_s > 0:
                return None, left_s
            live.end(live.late())

    def _take_ready(self) -> list[Item]:
        """Take the items that are ready, up to a chunk. The next wait handles end and error."""
        live, items = self._live, list[Item]()
        with live.output.changed:
            while live.error is None and not (items and isinstance(items[-1], AudioChunk)):
                item = live.output.take()
                if item is None:
                    break
                items.append(item)
        return items

    @property
    def _at_end(self) -> bool:
        """True where the last request has ended well, and all of its items were taken."""
        live = self._live
        with live.output.changed:
            taken = live.ended and live.error is None and not live.output.has_item
        return taken and self._next is None and not self._done

    def _next_event(self, item: Item | None) -> Event | None:
        """Return the event of an item; None where there is none yet, or the stream was closed."""
        if item is None and self._done:  # by another thread
            return None
        event = self._event_of(item)
        if isinstance(event, Finished):
            self._done = True
        return event

    def _event_of(self, item: Item | None) -> Event | None:
        """Return the event of an item; None where there is none yet. Each event passes here.

        item: None after the last one of a request.
        """
        if item is None:
            return None if self._go_on() else Finished(self._result())
        if isinstance(item, AudioChunk):
            chunk = self._joined(item)
            self._samples += len(chunk.samples)
            if self.keeps_audio:
                self._chunks.append(chunk)
            return chunk
        text, token_ids = (
            self._decoder.finish() if isinstance(item, TextEnd) else self._decoder.push(item)
        )
        if not token_ids:  # they complete no character yet
            return None
        self._texts.append(text)
        told, live = slice(self._told, self._told + len(token_ids)), self._live
        self._told = told.stop
        return TextDelta(text, token_ids, live.logprobs[told], live.top_logprobs[told])

    def _joined(self, chunk: AudioChunk) -> AudioChunk:
        """Return a chunk of this request with its place in the whole reply.

        Each request's audio is shorter than its frames by the vocoder's latency, 23 ms. Silence of
        that length is put between two, so that the reply is as long as its frames.
        """
        if len(self._lives) == 1:
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
        written = self._next.request.written
        self._decoder = TextStream(
            self._next.request.codec.decode, written.before if written else ""
        )
        self._live, self._told = self._next, 0
        self._lives.append(self._live)
        self._first_sample = self._samples
        self._submit_next()
        return True

    def _submit_next(self) -> None:
        self._next = None
        if self._later:
            request = replace(self._later.popleft(), arrived_s=self._clock.now())
            self._next, _ = self._pipeline.submit(request, after=self._live)
        if self._done:  # closed by another thread meanwhile
            self.close()

    async def _changed(self, seconds: float, *, chunk: bool = False) -> None:
        """Wait in an event loop for an item or the request's end, for `seconds` at most.

        chunk: wait for a chunk of audio, or the end.
        """
        live, loop = self._live, asyncio.get_running_loop()
        woken = loop.create_future()

        def there() -> bool:
            return live.ended or (live.output.has_chunk if chunk else live.output.has_item)

        def end() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> None:  # called with the lock held
            if there():
                live.output.on_change = None
                with suppress(RuntimeError):  # the loop was closed: nobody waits in it any more
                    loop.call_soon_threadsafe(end)

        with live.output.changed:
            if there():
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

    def _result(self) -> SpeechResult:
        lives, frames = self._lives, [codes for live in self._lives for codes in live.codes]
        # numpy's concatenate would release the interpreter lock, and delay the reply's end.
        audio = np.frombuffer(
            bytearray().join(chunk.samples.data for chunk in self._chunks), np.float32
        )
        codes = np.frombuffer(bytearray().join(codes.data for codes in frames), np.int64)
        reasons = {live.talker_finish for live in lives}
        cut: tuple[FinishReason, ...] = ("length", "runaway")
        return SpeechResult(
            text="".join(self._texts),
            token_ids=[token_id for live in lives for token_id in live.token_ids],
            codes=codes.reshape(len(frames), self._pipeline.code_groups),
            audio=audio,
            sample_rate=SAMPLE_RATE,
            thinker_finish_reason=lives[-1].thinker_finish,
            talker_finish_reason=next(
                (reason for reason in cut if reason in reasons), lives[-1].talker_finish
            ),
            timings=self._timings(self._samples / SAMPLE_RATE),
            seed=lives[0].seed,
            logprobs=[logprob for live in lives for logprob in live.logprobs],
            top_logprobs=[likeliest for live in lives for likeliest in live.top_logprobs],
            warnings=lives[0].request.prompt.warnings,
        )

    def _timings(self, audio_s: float) -> Timings:
        lives, live = self._lives, self._lives[0]
        times, request = live.timestamps, live.request
        assert times.admitted_s is not None and times.first_token_s is not None
        firsts = [live.timestamps.first_sample_s for live in lives]
        lasts = [live.timestamps.last_sample_s for live in lives]
        first = next((first_s for first_s in firsts if first_s is not None), None)
        last = next((last_s for last_s in reversed(lasts) if last_s is not None), None)
        arrived_s = request.arrived_s
        speech_s = {name: sum(live.speech_s[name] for live in lives) for name in live.speech_s}
        slow = max(speech_s, key=lambda name: speech_s[name])
        return Timings(
            queued_s=times.admitted_s - arrived_s,
            ttft_s=times.first_token_s - arrived_s,
            ttfb_s=None if first is None else first - arrived_s,
            total_s=self._clock.now() - arrived_s,
            audio_s=audio_s,
            rtf=None if last is None else (last - arrived_s) / audio_s,
            prompt_tokens=0 if request.written else len(request.prompt),
            reused_tokens=live.cached_rows,
            text_tokens=sum(len(live.token_ids) for live in lives),
            frames=sum(len(live.codes) for live in lives),
            prompt_audio_tokens=request.prompt.audio_tokens,
            prompt_image_tokens=request.prompt.image_tokens,
            speech_s=speech_s,
            slow_stage=slow if 0 < audio_s < speech_s[slow] else None,
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
