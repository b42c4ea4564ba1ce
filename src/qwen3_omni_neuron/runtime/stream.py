"""The caller's end of a request: a sync or async iterator over its events."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import replace

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


class SpeechStream(
    Iterator[Event],
    AsyncIterator[Event],
    AbstractContextManager["SpeechStream"],
    AbstractAsyncContextManager["SpeechStream"],
):
    """Iterator over a request's events: TextDelta, AudioChunk, and finally Finished.

    Use `for`, or `async for` in an event loop. A caller that does not read stalls its own request.
    `close`, the end of a `with` or `async with` block or dropping the stream cancels it.

    queue_position: position in the queue on arrival, 0 with a slot. prompt_tokens: of its prompt.
    keeps_audio: the result includes the audio. owner: object that must outlive the stream. later:
    requests that continue this stream, as a long text's pieces; each gets the previous one's slot.
    """

    def __init__(
        self, pipeline: Pipeline, request: Request, owner: object, later: Sequence[Request] = ()
    ):
        self._owner, self._pipeline, self._clock = owner, pipeline, pipeline.clock
        self.prompt_tokens, self.keeps_audio = len(request.prompt), True
        self._live, self.queue_position = pipeline.submit(request)  # read now
        self._done = False
        self._lives = [self._live]  # the current one last
        self._next: LiveRequest | None = None
        self._later = deque(later)
        self._decoder = TextStream(request.codec.decode)
        self._texts: list[str] = []
        self._told = 0  # of the current request
        self._chunks: list[AudioChunk] = []
        self._samples = 0
        self._submit_next()

    def __next__(self) -> Event:
        """Return the next event. Raises the error that ended the request."""
        since_s = self._clock.now()
        try:
            while isinstance(event := self._poll(since_s), float):
                with self._live.output.changed:
                    if not self._is_available():
                        self._live.output.changed.wait(event)
        except BaseException:
            self.close()
            raise
        if event is None:
            raise StopIteration
        return event

    async def __anext__(self) -> Event:
        """Return the next event. Cancelling the waiting task cancels the request."""
        since_s = self._clock.now()
        try:
            while isinstance(event := self._poll(since_s), float):
                await self._changed(event)
        except BaseException:
            self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def ready(self, delay_s: float) -> list[Event]:
        """Wait for the next event; return it, and others that are ready.

        Text waits delay_s for more. The list has at most one chunk, last unless Finished follows.
        Raises StopAsyncIteration after the end.
        """
        if delay_s > 0 and not self._done:
            try:
                await self._changed(delay_s, chunk=True)
            except BaseException:
                self.close()
                raise
        events = [await anext(self)]
        while not self._done:
            live = self._live
            with live.output.changed:
                there = isinstance(events[-1], TextDelta) if live.output.has_item else live.ended
                if not there or live.error is not None:  # the next call raises it
                    break
                item = live.output.take()
            if (event := self._event_of(item)) is not None:
                events.append(event)
        return events

    @property
    def slot(self) -> int:
        """The request's row in every engine; -1 while it is queued."""
        return self._live.slot

    def close(self) -> None:
        """Cancel the request. Its slot is free after each stage's next step."""
        self._done = True
        self._pipeline.cancel(self._live)
        if self._next is not None:
            self._pipeline.cancel(self._next)

    def __exit__(self, *_: object) -> None:
        with suppress(ForkError):  # in a child forked inside the block
            self.close()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def __repr__(self) -> str:
        where = "queued" if self.slot < 0 else f"in slot {self.slot}"
        state = "ended" if self._done else where
        return f"<{type(self).__name__}: {self.prompt_tokens} prompt tokens, {state}>"

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # not if the request was refused
            with suppress(ForkError):
                self._pipeline.call_without_waiting(self.close)

    def _poll(self, since_s: float) -> Event | float | None:
        """Return the next event, the remaining seconds to wait, or None after the end."""
        while not self._done:
            live = self._live
            with live.output.changed:
                if live.error is not None:
                    raise live.error
                item = live.output.take()
                if item is None and not live.ended:
                    left_s = live.deadline_s(since_s) - self._clock.now()
                    if left_s > 0:
                        return left_s
                    live.end(live.late())
                    continue
            if (event := self._event_of(item)) is not None:
                return event
        return None

    def _event_of(self, item: Item | None) -> Event | None:
        """Return an item's event, if already complete. item: None: a request's end."""
        if item is None:
            if self._done or self._go_on():  # closed by another thread
                return None
            finished = Finished(self._result())
            self._done = True
            return finished
        if isinstance(item, AudioChunk):
            samples = item.samples
            if self._samples and not item.first_sample:
                # A request's audio is shorter than its frames by the vocoder's latency, 23 ms.
                gap = np.zeros(self._pipeline.latency_samples, np.float32)
                samples = np.concatenate((gap, samples))
            chunk = AudioChunk(samples, self._samples, item.frames)
            self._samples += len(samples)
            if self.keeps_audio:
                self._chunks.append(chunk)
            return chunk
        text, token_ids = self._decoder.push(None if isinstance(item, TextEnd) else item)
        if not token_ids:  # no complete character yet
            return None
        self._texts.append(text)
        told, live = slice(self._told, self._told + len(token_ids)), self._live
        self._told = told.stop
        return TextDelta(text, token_ids, live.logprobs[told], live.top_logprobs[told])

    def _go_on(self) -> bool:
        if self._next is None:
            return False
        request = self._next.request
        before = request.written.before if request.written else ""
        self._decoder = TextStream(request.codec.decode, before)
        self._live, self._told = self._next, 0
        self._lives.append(self._live)
        self._submit_next()
        return True

    def _submit_next(self) -> None:
        self._next = None
        if self._later:
            request = replace(self._later.popleft(), arrived_s=self._clock.now())
            self._next, _ = self._pipeline.submit(request, after=self._live)
        if self._done:  # closed meanwhile
            self.close()

    def _is_available(self, chunk: bool = False) -> bool:
        """Return whether an item (chunk: audio) or the end is available. The lock is held."""
        output = self._live.output
        return self._live.ended or (output.has_chunk if chunk else output.has_item)

    async def _changed(self, seconds: float, *, chunk: bool = False) -> None:
        output, loop, woken = self._live.output, asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:  # the lock is held
            if self._is_available(chunk):
                output.on_change = None
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(woken.set)

        with output.changed:
            if self._is_available(chunk):
                return
            output.on_change = wake
        # Before Python 3.12, asyncio.wait_for loses a cancellation at the end of the wait.
        deadline = loop.call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            deadline.cancel()
            if output.on_change is not None:  # else `wake` has cleared it
                with output.changed:
                    output.on_change = None

    def _result(self) -> SpeechResult:
        lives, frames = self._lives, [codes for live in self._lives for codes in live.codes]
        # numpy's concatenate releases the GIL, and delays the reply's end.
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
    """Decoder of a growing reply to whole characters.

    decode: token ids to text, without special tokens. before: text before the first.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: str = ""):
        self._decode, self._before = decode, before
        self._buffered: list[int] = []

    def push(self, token_id: int | None) -> tuple[str, list[int]]:
        """Add a token, None for the end. Returns the newly completed text, and its ids.

        At the end, returns all buffered text.
        """
        if token_id is not None:
            self._buffered.append(token_id)
        if not self._buffered:
            return "", []
        text = self._decode(self._buffered)
        if token_id is not None and text.endswith(INCOMPLETE):
            return "", []
        ids, self._buffered = self._buffered, []
        text, self._before = self._before + text, ""
        return text, ids
