"""The answer to one request, whole or streamed."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished, SpeechResult
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.openai.errors import ApiError, error_event
from qwen3_omni_neuron.serving.service import Service

TEXT_DELAY_S = 0.05  # longest delay of text in a streamed answer
EVENTS = "text/event-stream"
"""Media type of server-sent events."""


def parts_of(request: Request) -> tuple[Service, Context]:
    """Return what all requests share, and what this one has."""
    return request.app.state.service, request.scope["context"]


class PieceStream(Response):
    """Response in pieces, which `AnswerSender.stream` sends: sound, or server-sent events.

    last_event: returns the event of an error that ends the events early.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str = EVENTS,
        last_event: Callable[[ApiError], bytes] = error_event,
    ):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self.last_event = last_event if media_type == EVENTS else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces."""
        answer: AnswerSender = scope["answer"]
        await answer.stream(self._pieces, self.raw_headers, self.last_event)


class ServedStream(AsyncIterator[list[Event]]):
    """Iterator over the events of one reply, in lists that are sent before the next is taken.

    A list has one event, or those of `SpeechStream.ready`, with text at most every TEXT_DELAY_S. A
    list with a chunk waits for its turn in the event loop, unless it is the client's first sound;
    so does each list of `ready` from then on. A reply that is read to its end is counted and
    logged, and its place is given back. playback: estimated playback of the chunks that were sent.
    muted: chunks are not sent any more.
    """

    def __init__(
        self,
        stream: SpeechStream,
        service: Service,
        context: Context | None = None,
        *,
        bursts: bool = False,
        keeps_audio: bool = False,
        speed: float = 1.0,
    ):
        """Set up reading.

        context: request that ends with the reply. keeps_audio: the sound is sent when it is
        complete. speed: factor by which the client's sound is faster than the chunks.
        """
        self.playback, self.muted = Playback(), False
        self._stream, self._service, self._context = stream, service, context
        stream.keeps_audio = keeps_audio
        self._bursts, self._speed = bursts, speed
        self._delay_s = 0.0  # of text in the next list
        self._sent: list[Event] = []

    async def __anext__(self) -> list[Event]:
        """Return the next events. Raises the error that ended the reply."""
        for event in self._sent:  # it is with the client by now, or in its connection's buffer
            if isinstance(event, Finished):
                self._end(event)
            elif isinstance(event, AudioChunk) and not self.muted:
                self.playback.arrived(len(event.samples) / SAMPLE_RATE / self._speed)
                if self._stream.keeps_audio and self._context is not None:
                    self._context.account.add(event.samples.nbytes)
        self._sent = []
        if self._bursts:
            events = await self._stream.ready(self._delay_s)
            self._delay_s = TEXT_DELAY_S
        else:
            events = [await anext(self._stream)]
        takes_turns = self._bursts or isinstance(events[0], AudioChunk)
        if takes_turns and self.playback.sent_s:  # the client has sound to play meanwhile
            await self._service.turnstile.wait()
        self._sent = events
        return events

    def close(self) -> None:
        """Cancel the reply."""
        self._stream.close()

    def _end(self, finished: Finished) -> None:
        self._service.metrics.finished(finished.result, self.playback)
        if self._context is not None:
            self._context.finished(finished.result)
            self._context.place.leave()


class Answer(ABC):
    """One answer with text, sent as server-sent events or as one JSON object at the end.

    _texts: parts of the text so far. _made: number of tokens and frames so far.
    """

    _id: str

    def __init__(self, stream: SpeechStream, service: Service, context: Context, streams: bool):
        """streams: it is sent while it is made."""
        self._service, self._context, self._streams = service, context, streams
        self._served = ServedStream(
            stream, service, context, bursts=streams, keeps_audio=not streams
        )
        self._created = int(time.time())
        self._texts: list[str] = []
        self._prompt_tokens, self._made = stream.prompt_tokens, 0
        self._result: SpeechResult | None = None

    @abstractmethod
    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a streamed answer, all that are ready in one piece.

        Text that is ready at the same time is one event.
        """

    def last_event(self, error: ApiError) -> bytes:
        """Return the event of an error that ends a streamed answer early."""
        return error_event(error)

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer as one object, in JSON."""

    @abstractmethod
    def _take(self, event: Event) -> Any:
        """Process an event. Returns the text that it completes."""

    async def response(self) -> Response:
        """Return the response in which it is sent."""
        if self._streams:
            return PieceStream(self.pieces(), last_event=self.last_event)
        with closing(self._served) as served:
            async for (event,) in served:
                self._take(event)
        self._finish()
        body = await self._service.model.in_thread(self.whole)
        return Response(body, media_type="application/json")

    def close(self) -> None:
        """Cancel the request."""
        self._served.close()

    @property
    def _ended(self) -> SpeechResult:
        assert self._result is not None, "an answer that has ended"
        return self._result

    def _finish(self) -> None:
        """Log the text."""
        if self._service.settings.log_content:
            self._context.answer = "".join(self._texts)

    def _completion(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object of this answer in the format of completions."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model.name,
            "system_fingerprint": f"qwen3-omni-neuron-{__version__}",
            "choices": choices,
        }


def json_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"
