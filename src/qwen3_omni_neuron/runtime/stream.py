"""The caller's end of a request: its events one by one, the text in whole characters."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

import numpy as np
import torch

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
from qwen3_omni_neuron.runtime.request import Request
from qwen3_omni_neuron.runtime.stop_strings import INCOMPLETE


class SpeechStream(Iterator[Event], AsyncIterator[Event]):
    """Iterator over a request's events: TextDelta and AudioChunk, and Finished at the end.

    It is read by `for` in a thread, or by `async for` in an event loop, which it does not block.

    The request starts at once. A caller that takes no events stops its own request, and no other,
    when the queue of its output is full. `close`, the end of a `with` block or dropping the stream
    cancels the request. An error in any stage is raised by the next event.
    queue_position: position in the queue for a slot when the request came, 0 where it got one at
    once. owner: object that must live as long as the stream, the model.
    """

    def __init__(self, pipeline: Pipeline, request: Request, owner: object):
        self._live, self.queue_position = pipeline.submit(request)
        self._pipeline, self._owner = pipeline, owner
        self._clock = pipeline.clock
        self._text = TextStream(request.thinker.decode_text)
        self._texts: list[str] = []
        self._chunks: list[AudioChunk] = []
        self._done = False

    def __next__(self) -> Event:
        """Return the next event. Raises the error that ended the request, such as a LateError."""
        if self._done:
            raise StopIteration
        try:
            event = self._next_event()
        except BaseException:
            self.close()
            raise
        self._done = isinstance(event, Finished)
        return event

    async def __anext__(self) -> Event:
        """Return the next event without blocking the event loop; otherwise as `__next__`.

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
        self._done = isinstance(event, Finished)
        return event

    @property
    def slot(self) -> int:
        """The request's row in every engine, also after its end; -1 while it is queued."""
        return self._live.slot

    def close(self) -> None:
        """Cancel the request. Its slot is free after at most one more step of each stage."""
        self._done = True
        self._pipeline.cancel(self._live)

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
        """Return the event of an item; None where it gives no whole character yet."""
        if item is None:
            return Finished(self._result())
        if isinstance(item, AudioChunk):
            self._chunks.append(item)
            return item
        delta = self._text.finish() if isinstance(item, TextEnd) else self._text.push(item)
        if not delta[1]:
            return None
        self._texts.append(delta[0])
        return TextDelta(*delta)

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
        """Wait as `_next_item`, in an event loop. Raises StopAsyncIteration where it was closed."""
        loop, output, since_s = asyncio.get_running_loop(), self._live.output, self._clock.now()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                output.on_change = None
                loop.call_soon_threadsafe(woken.set)

            with output.changed:
                item, remaining_s = self._take(since_s)
                if remaining_s is None:
                    if item is None and self._done:
                        raise StopAsyncIteration
                    return item
                output.on_change = wake
            # Not wait_for: before Python 3.12 it loses a cancel that comes as the wait ends.
            deadline = loop.call_later(remaining_s, woken.set)  # the next turn ends the request
            try:
                await woken.wait()
            finally:
                deadline.cancel()
                with output.changed:
                    output.on_change = None

    def _take(self, since_s: float) -> tuple[Item | None, float | None]:
        """Take an item where there is one; the lock is held.

        since_s: when the wait began. Returns the item, None after the last one; and, where it must
        be waited for, the time until its deadline. Raises the error that ended the request.
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
        live = self._live
        audio = np.concatenate([np.zeros(0, np.float32), *(c.samples for c in self._chunks)])
        codes = torch.zeros((0, self._pipeline.code_groups), dtype=torch.int64)
        if live.codes:
            codes = torch.stack(live.codes)
        return SpeechResult(
            text="".join(self._texts),
            token_ids=live.token_ids,
            codes=codes.numpy(),
            audio=audio,
            sample_rate=SAMPLE_RATE,
            thinker_finish_reason=live.thinker_finish,
            talker_finish_reason=live.talker_finish,
            timings=self._timings(len(audio) / SAMPLE_RATE),
            seed=live.request.seed,
        )

    def _timings(self, audio_s: float) -> Timings:
        live, times, arrived_s = self._live, self._live.timestamps, self._live.request.arrived_s
        assert times.admitted_s is not None and times.first_token_s is not None
        first, last = times.first_sample_s, times.last_sample_s
        return Timings(
            queued_s=times.admitted_s - arrived_s,
            ttft_s=times.first_token_s - arrived_s,
            ttfb_s=None if first is None else first - arrived_s,
            total_s=self._clock.now() - arrived_s,
            audio_s=audio_s,
            rtf=None if last is None else (last - arrived_s) / audio_s,
            prompt_tokens=len(live.request.thinker.prompt),
            reused_tokens=live.reused_rows,
            text_tokens=len(live.token_ids),
            frames=len(live.codes),
            prompt_audio_tokens=live.request.thinker.prompt.audio_tokens,
            prompt_image_tokens=live.request.thinker.prompt.image_tokens,
        )


class TextStream:
    """Decoder of a growing reply, which returns whole characters.

    A character may be spelled by several tokens. decode: token ids to text, special tokens skipped.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._held: list[int] = []

    def push(self, token_id: int) -> tuple[str, list[int]]:
        """Add a token. Returns the text that is now complete and its ids; both may be empty."""
        self._held.append(token_id)
        text = self._decode(self._held)
        if text.endswith(INCOMPLETE):
            return "", []
        return self._release(text)

    def finish(self) -> tuple[str, list[int]]:
        """Return the text of the tokens that are still held, as far as it can be decoded."""
        return self._release(self._decode(self._held)) if self._held else ("", [])

    def _release(self, text: str) -> tuple[str, list[int]]:
        ids, self._held = self._held, []
        return text, ids
