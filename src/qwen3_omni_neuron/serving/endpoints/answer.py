"""The answer to one conversation, whole or in pieces.

Each endpoint parses its body into a `Question`'s `ChatRequest`, and has a subclass of `Reply`,
which writes the answer.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    SpeechResult,
    TextDelta,
)
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai.chat_request import (
    ChatRequest,
    check_request,
    conversation,
    item_fields,
    request_options,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError, error_event
from qwen3_omni_neuron.serving.openai.fields import has_grammar
from qwen3_omni_neuron.serving.openai.reply import (
    Call,
    Content,
    Reasoning,
    ReplyPart,
    ReplyText,
    token_logprobs,
)
from qwen3_omni_neuron.serving.service import Service

TEXT_DELAY_S = 0.05  # longest delay of text in a streamed answer
EVENTS = "text/event-stream"
"""Media type of server-sent events."""
DONE = b"data: [DONE]\n\n"
"""Server-sent event after all others."""
Json = dict[str, Any]
ReplyMaker = Callable[["Question", SpeechStream], "Reply"]
"""Function (question without media, its stream) -> reply."""


def parts_of(request: Request) -> tuple[Service, Context]:
    """Return the server's and the request's state."""
    return request.app.state.service, request.scope["context"]


class PieceStream(Response):
    """Response in pieces, sent by `AnswerSender.stream`: sound, or server-sent events.

    last_event: returns the event of a later error.
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
    """Iterator over a reply's events, in lists that are sent one after the other.

    A list has one event, or those of `SpeechStream.ready`, with text at most every TEXT_DELAY_S. A
    list with a chunk, except the client's first sound, and each later list of `ready` waits for its
    turn in the event loop. A reply read to its end is counted and logged, and its place released.
    playback: estimated playback of the sent chunks. muted: send no more chunks.
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
        """context: request that ends with the reply. keeps_audio: sound is sent when complete.

        speed: of the client's sound relative to the chunks.
        """
        self.playback, self.muted = Playback(), False
        self._stream, self._service, self._context = stream, service, context
        stream.keeps_audio = keeps_audio
        self._bursts, self._speed = bursts, speed
        self._delay_s = 0.0  # of text in the next list
        self._sent: list[Event] = []

    async def __anext__(self) -> list[Event]:
        """Return the next events. Raises the error that ended the reply."""
        for event in self._sent:  # sent, or in the connection's buffer
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
        if takes_turns and self.playback.sent_s:  # the client has sound to play
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
    """One answer with text, sent as server-sent events or one final JSON object.

    _texts: parts of the text so far. _made: tokens and frames so far.
    """

    _id: str

    def __init__(self, stream: SpeechStream, service: Service, context: Context, streams: bool):
        """streams: it is sent while it is written."""
        self._service, self._context, self._streams = service, context, streams
        self._served = ServedStream(
            stream, service, context, bursts=streams, keeps_audio=not streams
        )
        self._created = int(time.time())
        self._texts: list[str] = []
        self._prompt_tokens, self._made = stream.prompt_tokens, 0
        self._result: SpeechResult | None = None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield a streamed answer's server-sent events; simultaneous ones in one piece.

        Text ready at one time is one event.
        """
        pieces = self._first()
        with closing(self._served) as served:
            async for events in served:
                pieces += await self._next(events)
                if self._result is None and pieces:
                    yield b"".join(pieces)
                    pieces = []
        self._finish()
        yield b"".join((*pieces, *self._last()))

    def last_event(self, error: ApiError) -> bytes:
        """Return the event of an error that ends a streamed answer."""
        return error_event(error)

    @abstractmethod
    def whole(self) -> bytes:
        """Return the answer as one JSON object."""

    def _first(self) -> list[bytes]:
        """Return the server-sent events that precede the reply."""
        return []

    @abstractmethod
    async def _next(self, events: Sequence[Event]) -> list[bytes]:
        """Process simultaneous events. Returns their server-sent events."""

    @abstractmethod
    def _last(self) -> list[bytes]:
        """Return the server-sent events of the reply's end."""

    @abstractmethod
    def _take(self, events: Sequence[Event]) -> Any:
        """Process simultaneous events. Returns the parts to send."""

    async def response(self) -> Response:
        """Return the response that sends it."""
        if self._streams:
            return PieceStream(self.pieces(), last_event=self.last_event)
        await self.collect()
        body = await self._service.readers.run(self._context.owner, self.whole)
        return Response(body, media_type="application/json")

    async def collect(self) -> None:
        """Read the stream to its end."""
        with closing(self._served) as served:
            async for events in served:
                self._take(events)
        self._finish()

    def close(self) -> None:
        """Cancel the request."""
        self._served.close()

    @property
    def _ended(self) -> SpeechResult:
        assert self._result is not None, "an answer that has ended"
        return self._result

    def _finish(self) -> None:
        if self._service.settings.log_content:
            self._context.answer = "".join(self._texts)

    def _completion(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
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


async def answer(
    service: Service, context: Context, read: Callable[[], Any], in_thread: bool
) -> Response:
    """Answer one conversation, whole or in pieces. Raises ApiError and the API's errors.

    read: parses the body, and returns a Question, or an object with its methods. in_thread: reading
    may take long, as may many short bodies of one owner beside another's.
    """
    begun: Reply | Question
    run = partial(service.readers.run, context.owner)
    if in_thread or service.requests.crowds(context.owner):
        begun = await run(lambda: read().begin())
    elif (question := read()).takes_long:
        begun = await run(question.begin)
    else:
        begun = question.answer()
    if isinstance(begun, Question):
        await begun.finish()
        begun = await run(begun.answer)
    context.release_body()
    return await begun.response()


class Question:
    """A parsed request, whose media may need decoding, and grammar compiling."""

    def __init__(
        self,
        wanted: ChatRequest,
        reply: ReplyMaker,
        service: Service,
        context: Context,
        names: Sequence[str] | None = None,
    ):
        """Check a request, and start to read its media. Raises ApiError.

        names: its messages' in errors; None: messages[0] and so on.
        """
        self.wanted, self.service, self.context, self._reply = wanted, service, context, reply
        self._compiling: Future[Any] | None = None  # the grammar, in another process
        omni = context.omni
        check_request(wanted)
        if wanted.speaks and not omni.info.speakers:
            raise ApiError(
                400,
                "this checkpoint has no talker: it can write text, not speak. Leave audio out of "
                "modalities.",
                "no_speech",
                "modalities",
            )
        voices = service.voices_of(omni)
        self.options = request_options(
            wanted, service.settings, context.owner, voices, omni.info.thinks
        )
        hears_videos = self.options.get("use_audio_in_video") is True
        self._media = MediaReader(
            service, omni, context.owner, hears_videos, context.param, fields=item_fields(wanted)
        )
        context.warnings = self._media.warnings
        transcript = partial(service.replies.get, context.owner)
        self._messages = conversation(wanted, self._media.read, transcript, names)

    @property
    def takes_long(self) -> bool:
        """True if it has media to read, or a grammar to compile."""
        return self._media.pending or has_grammar(self.options)

    def begin(self) -> "Reply | Question":
        """Start the request, unless other processes must read its media or grammar.

        Raises ApiError and the API's errors.
        """
        hold = self.context.account.hold
        if has_grammar(self.options):
            self._compiling = self.context.omni.compile_grammar(hold, **self.options)
        inline = self._media.finish_inline(hold)
        return self.answer() if inline and self._compiling is None else self

    async def finish(self) -> None:
        """Wait for the grammar and the media. Raises ApiError and the API's errors."""
        if self._compiling is not None:
            self.options["grammar"] = await asyncio.wrap_future(self._compiling)
        await self._media.finish(self.context.account.hold)

    def answer(self) -> "Reply":
        """Start the request. Raises the API's errors."""
        wanted, context = self.wanted, self.context
        context.wanted(bool(wanted.stream), wanted.speaks)
        ask = context.omni.stream if wanted.speaks else context.omni.stream_text
        stream = ask(self._messages, **self.options)
        if self.service.settings.log_content:  # after the checks, which bound its length
            context.question = [_texts(message) for message in self._messages]
        return self._reply(self, stream)

    def close(self) -> None:
        """Stop compiling the grammar."""
        if self._compiling is not None:
            self._compiling.cancel()


def _texts(message: Json) -> Json:
    content = message["content"]
    if not isinstance(content, str):
        content = [item.get("text", f"({item['type']})") for item in content]
    return {"role": message["role"], "content": content}


class Reply(Answer):
    """Answer to a conversation.

    _texts, _reasons, _calls: parts so far. _logprobs: of _texts' tokens, if requested.
    """

    def __init__(self, question: Question, stream: SpeechStream):
        self.wanted = question.wanted
        super().__init__(stream, question.service, question.context, bool(self.wanted.stream))
        self.wanted.messages.clear()  # frees the media, as large as everything else
        self._split = ReplyText(self._context.omni.info.thinks, "tools" in question.options)
        self._reasons: list[str] = []
        self._calls: list[Call] = []
        self._reasoning_tokens = 0
        self._logprobs: list[Json] = []
        self._held_logprobs: list[Json] = []  # of tokens of text of a still unknown kind

    @property
    def _reached_limit(self) -> bool:
        """True if the text, or the speech that a client hears, reached its limit."""
        heard = None if self._calls else self._ended.talker_finish_reason
        return "length" in (self._ended.thinker_finish_reason, heard)

    def _take(self, events: Sequence[Event]) -> tuple[list[ReplyPart], AudioChunk | None]:
        """Process simultaneous events. Returns the text's parts, and the chunk to send.

        Joins adjacent parts of one kind. From the first tool call on, speech is left out.
        """
        parts, chunk = list[ReplyPart](), None
        for event in events:
            if isinstance(event, TextDelta):
                self._made += len(event.token_ids)
                if event.logprobs:
                    spell = self._context.omni.prompt_builder.token_bytes
                    self._held_logprobs += token_logprobs(event, spell)
                self._add(self._split.push(event.text), parts)
                if self._split.reasons:
                    self._reasoning_tokens += len(event.token_ids)
            elif isinstance(event, AudioChunk):
                self._made += event.frames
                chunk = event
            else:
                self._result = event.result
                cut = event.result.thinker_finish_reason == "length"
                self._add(self._split.finish(at_limit=cut), parts)
        return parts, None if self._calls else chunk

    def _add(self, new: Sequence[ReplyPart], parts: list[ReplyPart]) -> None:
        """Add an event's parts to the whole answer and to the parts to send.

        The first content has the log-probabilities of all the event's tokens.
        """
        for part in new:
            before = parts[-1] if parts else None
            if isinstance(part, Call):
                self._calls.append(part)
                parts.append(part)
            elif isinstance(part, Reasoning):
                self._reasons.append(part.text)
                if isinstance(before, Reasoning):
                    parts[-1] = Reasoning(before.text + part.text)
                else:
                    parts.append(part)
            else:
                logprobs, self._held_logprobs = self._held_logprobs, []
                self._texts.append(part.text)
                self._logprobs += logprobs
                if isinstance(before, Content):
                    parts[-1] = Content(before.text + part.text, [*before.logprobs, *logprobs])
                else:
                    parts.append(Content(part.text, logprobs))
        if new:
            self._held_logprobs = []
