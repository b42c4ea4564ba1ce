"""POST /v1/chat/completions: a conversation in, text and speech out, whole or as it is made."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pybase64
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic_core import to_json

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    SpeechResult,
    TextDelta,
)
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.media.fitting import Room
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import PieceStream, json_event
from qwen3_omni_neuron.serving.endpoints.chat_deltas import WRITTEN, spoken
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.endpoints.served_stream import ServedStream
from qwen3_omni_neuron.serving.endpoints.sound import encode_sound
from qwen3_omni_neuron.serving.openai.bodies import (
    SMALL_BODY_BYTES,
    check_model,
    has_grammar,
    parse_json,
)
from qwen3_omni_neuron.serving.openai.chat_request import (
    FURTHER_FIELDS,
    ChatRequest,
    NamedTool,
    check_request,
    conversation,
    request_options,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.ids import new_id
from qwen3_omni_neuron.serving.openai.openapi import body_of, errors_of
from qwen3_omni_neuron.serving.openai.reply_text import (
    Call,
    Content,
    Reasoning,
    ReplyPart,
    ReplyText,
)
from qwen3_omni_neuron.serving.openai.usage import chat_usage
from qwen3_omni_neuron.serving.openai.vllm_omni import VLLM_OMNI
from qwen3_omni_neuron.serving.openai.without_effect import CHAT
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()
Json = dict[str, Any]


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatRequest, FURTHER_FIELDS),
    responses=errors_of(with_body=True),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation in text, and in speech where `modalities` has audio."""
    service: Service = request.app.state.service
    context: Context = request.scope["context"]
    begun: ChatReply | ChatQuestion
    if len(context.body) > SMALL_BODY_BYTES or service.replies.may_wait(context.body):
        begun = await service.model.start(_read_and_begin, service, context)
    elif (question := _read(service, context)).takes_long:
        begun = await service.model.start(question.begin)
    else:
        begun = question.answer()
    if isinstance(begun, ChatQuestion):
        await begun.finish()
        begun = await service.model.start(begun.answer)
    reply = begun
    context.release_body()
    if reply.wanted.stream:
        return PieceStream(reply.pieces())
    await reply.collect()
    body = await service.model.in_thread(reply.whole)
    return Response(body, media_type="application/json")


@router.delete(
    "/v1/chat/completions/{completion_id}", responses={**errors_of(), 404: errors_of(True)[404]}
)
async def delete_chat_completion(request: Request, completion_id: str) -> Json:
    """Delete the transcript of a spoken reply, which no later turn can name then."""
    service: Service = request.app.state.service
    context: Context = request.scope["context"]
    if not await service.replies.delete(completion_id, context.owner):
        message = (
            f"no spoken reply of {completion_id[:80]!r} is kept: it has expired, was deleted, or "
            "never was."
        )
        raise ApiError(404, message, "completion_not_found")
    return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}


def _read_and_begin(service: Service, context: Context) -> "ChatReply | ChatQuestion":
    """Parse a request's body and begin the request; see ChatQuestion.begin."""
    return _read(service, context).begin()


def _read(service: Service, context: Context) -> "ChatQuestion":
    """Parse a request's body. Raises ApiError."""
    wanted = parse_json(ChatRequest, context.body)
    omni = context.omni
    check_model(service, wanted.model)
    check_request(wanted)
    service.count_without_effect(CHAT, wanted)
    if wanted.speaks and not omni.info.speakers:
        raise ApiError(
            400,
            "this checkpoint has no talker: it can write text, not speak. Leave audio out of "
            "modalities.",
            "no_speech",
            "modalities",
        )
    voices = service.voices_of(omni)
    options = request_options(wanted, service.settings, context.owner, voices, omni.info.thinks)
    hears_videos = options.get("use_audio_in_video") is True
    media = MediaReader(service, omni, context.owner, hears_videos)
    context.warnings = media.warnings
    messages = conversation(wanted, media, service.replies, context.owner)
    return ChatQuestion(wanted, messages, options, media, service, context)


@dataclass
class ChatQuestion:
    """A parsed request whose media may still have to be decoded, and its grammar compiled.

    messages, options: arguments of the Python API. media: reader of these messages' media.
    compiling: the grammar, while another process compiles it.
    """

    wanted: ChatRequest
    messages: list[Json]
    options: Json
    media: MediaReader
    service: Service
    context: Context
    compiling: "Future[Any] | None" = None

    @property
    def takes_long(self) -> bool:
        """True where it has media to read, or a grammar to compile."""
        return self.media.pending or has_grammar(self.options)

    def begin(self) -> "ChatReply | ChatQuestion":
        """Start the request, unless it has media or a grammar for another process.

        Raises ApiError and the API's errors.
        """
        hold = self.context.account.hold
        if has_grammar(self.options):
            self.compiling = self.context.omni.compile_grammar(hold, **self.options)
        inline = self.media.finish_inline(hold)
        return self.answer() if inline and self.compiling is None else self

    async def finish(self) -> None:
        """Wait for the grammar and the media. Raises ApiError and the API's errors."""
        try:
            if self.compiling is not None:
                self.options["grammar"] = await asyncio.wrap_future(self.compiling)
            await self.media.finish(self.context.account.hold, self._room)
        except BaseException:
            self.close()
            raise

    async def _room(self) -> Room:
        """Return the tokens that the conversation leaves for its media."""
        find = partial(self.context.omni.media_room, self.messages, **self.options)
        return await self.service.model.in_thread(find)

    def answer(self) -> "ChatReply":
        """Start the request. Raises the API's errors."""
        wanted, context = self.wanted, self.context
        context.wanted(bool(wanted.stream), wanted.speaks)
        ask = context.omni.stream if wanted.speaks else context.omni.stream_text
        stream = ask(self.messages, **self.options)
        if self.service.settings.log_content:  # only now: a refused request may have any length
            context.question = [_texts(message) for message in self.messages]
        return ChatReply(wanted, stream, self.options, self.service, context)

    def close(self) -> None:
        """Stop compiling the grammar."""
        if self.compiling is not None:
            self.compiling.cancel()


def _texts(message: Json) -> Json:
    """Return a message without its media."""
    content = message["content"]
    if not isinstance(content, str):
        content = [item.get("text", f"({item['type']})") for item in content]
    return {"role": message["role"], "content": content}


class ChatReply:
    """One answer, sent as a stream of server-sent events or as one JSON object at the end."""

    def __init__(
        self,
        wanted: ChatRequest,
        stream: SpeechStream,
        options: Json,
        service: Service,
        context: Context,
    ):
        self.wanted, self._service, self._context = wanted, service, context
        self._served = ServedStream(stream, service, context, bursts=bool(wanted.stream))
        wanted.messages.clear()  # frees the media, which are as large as everything else
        self._id, self._created = new_id("chatcmpl-"), int(time.time())
        self._audio_id, self._expires_at = service.replies.named(self._id)
        self._split = ReplyText(context.omni.info.thinks, "tools" in options)
        self._voice = options.get("speaker", RequestOptions.speaker)
        self._deltas = WRITTEN
        if wanted.in_vllm_omnis_way:
            self._deltas = VLLM_OMNI
        elif wanted.speaks:
            sound = self._voice, self._expires_at, wanted.sound_format == "wav"
            self._deltas = spoken(self._audio_id, *sound)
        self._texts: list[str] = []
        self._reasons: list[str] = []
        self._calls: list[Call] = []
        self._reasoning_tokens = 0
        self._samples: list[NDArray[np.float32]] = []
        self._result: SpeechResult | None = None
        frame = to_json(self._frame([])).removesuffix(b"[]}")
        self._before_delta = b"data: " + frame + b'[{"index":0,"delta":'

    def close(self) -> None:
        """Cancel the request."""
        self._served.close()

    async def collect(self) -> None:
        """Read the stream to its end."""
        with closing(self._served) as served:
            async for (event,) in served:
                self._take(event)
        self._finish()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a streamed answer, all that are ready in one piece.

        Text that is ready at the same time is one event.
        """
        pieces = [self._piece(self._deltas.first)]
        with closing(self._served) as served:
            async for events in served:
                parts = [part for event in events for part in self._take(event)]
                pieces += [self._piece(self._delta(part)) for part in _joined(parts)]
                chunk = next((event for event in events if isinstance(event, AudioChunk)), None)
                if chunk is not None and not self._calls:
                    pieces.append(self._event(self._deltas.sound(chunk), "audio"))
                if self._result is None:
                    yield b"".join(pieces)
                    pieces = []
        self._finish()
        *others, last = self._deltas.last
        pieces += [*map(self._piece, others), self._piece(last, self._finish_reason())]
        options = self.wanted.stream_options
        if options is not None and options.include_usage:
            pieces.append(json_event(self._frame([]) | {"usage": self._usage()}))
        yield b"".join((*pieces, b"data: [DONE]\n\n"))

    def whole(self) -> bytes:
        """Return the answer as one object, in JSON."""
        message: Json = {"role": "assistant", "content": "".join(self._texts) or None}
        message["refusal"] = None
        if self._reasons:
            message["reasoning_content"] = "".join(self._reasons)
        if self._calls:
            message["tool_calls"] = [_call(call) for call in self._calls]
        if self.wanted.speaks and not self._calls:
            samples = np.concatenate([np.zeros(0, np.float32), *self._samples])
            sound = encode_sound(samples, SAMPLE_RATE, self.wanted.sound_format)
            message["content"] = None
            message["audio"] = {
                "id": self._audio_id,
                "voice": self._voice,
                "data": pybase64.b64encode(sound).decode("ascii"),
                "expires_at": self._expires_at,
                "transcript": "".join(self._texts),
            }
        elif not self._calls:
            message["content"] = "".join(self._texts)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(),
        }
        answer = self._frame([choice], "chat.completion") | {"usage": self._usage()}
        if self._context.warnings:
            answer["warnings"] = self._context.warnings
        return to_json(answer)

    def _take(self, event: Event) -> list[ReplyPart]:
        """Process an event. Returns the parts of text that it completes."""
        if isinstance(event, TextDelta):
            return self._noted(self._split.push(event.text), len(event.token_ids))
        if isinstance(event, AudioChunk):
            # A tool call is not meant to be heard: from the first call on, speech is left out.
            if not self._calls and not self.wanted.stream:
                self._samples.append(event.samples)
            return []
        self._result = event.result
        return self._noted(self._split.finish(), 0)

    def _noted(self, parts: list[ReplyPart], tokens: int) -> list[ReplyPart]:
        """Add parts to the whole answer and return them. tokens: number that they came from."""
        for part in parts:
            if isinstance(part, Reasoning):
                self._reasons.append(part.text)
                self._reasoning_tokens += tokens
            elif isinstance(part, Content):
                self._texts.append(part.text)
            else:
                self._calls.append(part)
        return parts

    def _delta(self, part: ReplyPart) -> Json:
        """Return a part as the delta of a streamed answer."""
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, Call):
            return {"tool_calls": [{"index": self._calls.index(part), **_call(part)}]}
        return self._deltas.text(part.text)

    def _finish(self) -> None:
        """Keep the transcript of the complete reply for later turns, and for the log."""
        text = "".join(self._texts)
        if self.wanted.speaks:
            self._service.replies.keep(self._audio_id, self._expires_at, self._context.owner, text)
        if self._service.settings.log_content:
            self._context.answer = text

    def _finish_reason(self) -> str:
        assert self._result is not None, "an answer that has ended"
        if self._calls:  # as OpenAI: a client that has named the function knows of the call
            return "stop" if isinstance(self.wanted.tool_choice, NamedTool) else "tool_calls"
        reasons = self._result.thinker_finish_reason, self._result.talker_finish_reason
        return "length" if "length" in reasons else "stop"

    def _usage(self) -> Json:
        assert self._result is not None, "an answer that has ended"
        return chat_usage(self._result.timings, self._reasoning_tokens)

    def _piece(self, delta: Json, finish_reason: str | None = None) -> bytes:
        """Return a delta as a server-sent event."""
        return self._event((to_json(delta),), "text", finish_reason)

    def _event(
        self, delta: Sequence[bytes], modality: str, finish_reason: str | None = None
    ) -> bytes:
        """Return an event. The text that all events share is made once.

        delta: parts of its JSON; they may be as long as a chunk and are copied once.
        """
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        end = f',"logprobs":null,"finish_reason":{reason}}}],"modality":"{modality}"}}\n\n'
        return b"".join((self._before_delta, *delta, end.encode()))

    def _frame(self, choices: list[Json], kind: str = "chat.completion.chunk") -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model.name,
            "system_fingerprint": f"qwen3-omni-neuron-{__version__}",
            "choices": choices,
        }


def _joined(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    """Join adjacent parts of one kind, except calls."""
    joined: list[ReplyPart] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, Reasoning | Content) and isinstance(before, type(part)):
            joined[-1] = type(part)(before.text + part.text)
        else:
            joined.append(part)
    return joined


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
