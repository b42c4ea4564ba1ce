"""POST /v1/chat/completions: a conversation in, text and speech out, whole or as it is made."""

import base64
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    SpeechResult,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.bodies import check_model, parse_json
from qwen3_omni_neuron.serving.chat_request import (
    FURTHER_FIELDS,
    ChatRequest,
    check_request,
    conversation,
    request_options,
)
from qwen3_omni_neuron.serving.context import Context
from qwen3_omni_neuron.serving.errors import ApiError
from qwen3_omni_neuron.serving.event_stream import EventStream, json_event, with_first
from qwen3_omni_neuron.serving.media import MediaReader
from qwen3_omni_neuron.serving.metrics import Player
from qwen3_omni_neuron.serving.openapi import body_of, errors_of
from qwen3_omni_neuron.serving.reply_text import Call, Content, Part, Reasoning, ReplyText
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.sound import encode_sound, pcm16, wav_header

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
    chat = await service.model.in_thread(_read, service, context)
    wanted = chat.wanted
    context.wanted(bool(wanted.stream), wanted.speaks)
    stream = await service.model.start(chat.start)
    reply = ChatReply(wanted, bool(chat.options.get("tools")), service, context)
    del chat  # its media
    context.release_body()
    if wanted.stream:
        pieces = await with_first(reply.pieces(stream))
        return EventStream(pieces)
    with stream:
        async for event in stream:
            reply.take(event)
            if isinstance(event, AudioChunk):
                reply.player.arrived(event)
    body = await service.model.in_thread(reply.whole)
    return Response(body, media_type="application/json")


@dataclass(frozen=True)
class Chat:
    """A request that has been read: what was wanted, and what the model is asked for."""

    wanted: ChatRequest
    messages: list[Json]
    options: Json
    service: Service

    def start(self) -> SpeechStream:
        """Start it. Raises the API's errors."""
        omni = self.service.model.take()
        ask = omni.stream if self.wanted.speaks else omni.stream_text
        return ask(self.messages, **self.options)


def _read(service: Service, context: Context) -> Chat:
    """Read a request's body and its media. Raises ApiError."""
    wanted = parse_json(ChatRequest, context.body)
    omni = service.model.take()
    check_model(service, wanted.model)
    check_request(wanted)
    if wanted.speaks and not omni.info.speakers:
        raise ApiError(
            400,
            "this checkpoint has no talker: it can write text, not speak. Leave audio out of "
            "modalities.",
            "no_speech",
            "modalities",
        )
    options = request_options(wanted, service.settings, context.owner)
    media = MediaReader(service.settings, service.fetcher)
    messages = conversation(wanted, media, service.replies, context.owner)
    if service.settings.log_content:
        context.question = [m for message in messages if (m := _texts(message))]
    return Chat(wanted, messages, options, service)


def _texts(message: Json) -> Json:
    """Return a message without its media."""
    content = message["content"]
    if not isinstance(content, str):
        content = [item.get("text", f"({item['type']})") for item in content]
    return {"role": message["role"], "content": content}


class ChatReply:
    """One answer: its events become the pieces of a stream, or one object at the end."""

    def __init__(self, wanted: ChatRequest, takes_calls: bool, service: Service, context: Context):
        self._wanted, self._service, self._context = wanted, service, context
        wanted.messages.clear()  # its media, which are as large as all else together
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._speaks, self._vllm_omni = wanted.speaks, wanted.in_vllm_omnis_way
        self._audio_id, self._expires_at = service.replies.new_id()
        info = service.model.take().info
        self._split = ReplyText(info.thinks, takes_calls)
        self._texts: list[str] = []
        self._reasons: list[str] = []
        self._calls: list[Call] = []
        self._reasoning_tokens = 0
        self._samples: list[NDArray[np.float32]] = []
        self._result: SpeechResult | None = None
        self._headed = False
        self.player = Player()

    def take(self, event: Event) -> list[Json]:
        """Take an event. Returns the deltas that it makes."""
        if isinstance(event, TextDelta):
            return self._text_deltas(self._split.push(event.text), len(event.token_ids))
        if isinstance(event, AudioChunk):
            # A call of a tool is not for the ear: from there on the speech is left out.
            if self._calls:
                return []
            self._samples.append(event.samples)
            return [self._sound(event)]
        self._result = event.result
        deltas = self._text_deltas(self._split.finish(), 0)
        self._finish(event.result)
        if self._speaks and not self._vllm_omni:
            deltas.append({"audio": {"expires_at": self._expires_at}})
        return deltas

    async def pieces(self, stream: SpeechStream) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a streamed answer."""
        with stream:
            first: Json = {"role": "assistant", "content": ""}
            if self._speaks and not self._vllm_omni:
                first |= {"content": None, "audio": {"id": self._audio_id}}
            begun = False
            async for event in stream:
                if not begun:
                    begun = True
                    yield self._piece(first)
                deltas = self.take(event)
                for delta in deltas:
                    yield self._piece(delta)
                # After the yield: the client, or its connection's buffer, has it now.
                if isinstance(event, AudioChunk):
                    self.player.arrived(event)
        # vllm-omni's clients print the content of every piece.
        yield self._piece({"content": ""} if self._vllm_omni else {}, self._finish_reason())
        options = self._wanted.stream_options
        if options is not None and options.include_usage:
            yield json_event(self._frame([]) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def whole(self) -> bytes:
        """Return the answer as one object, in JSON."""
        message: Json = {"role": "assistant", "content": "".join(self._texts) or None}
        message["refusal"] = None
        if self._reasons:
            message["reasoning_content"] = "".join(self._reasons)
        if self._calls:
            message["tool_calls"] = [_call(call) for call in self._calls]
        if self._speaks and not self._calls:
            samples = np.concatenate([np.zeros(0, np.float32), *self._samples])
            sound = encode_sound(samples, SAMPLE_RATE, self._wanted.sound_format)
            message["content"] = None
            message["audio"] = {
                "id": self._audio_id,
                "data": base64.b64encode(sound).decode("ascii"),
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
        return json.dumps(answer, ensure_ascii=False).encode()

    def _text_deltas(self, parts: list[Part], tokens: int) -> list[Json]:
        deltas: list[Json] = []
        for part in parts:
            if isinstance(part, Reasoning):
                self._reasons.append(part.text)
                self._reasoning_tokens += tokens
                deltas.append({"reasoning_content": part.text})
            elif isinstance(part, Content):
                self._texts.append(part.text)
                spoken = self._speaks and not self._vllm_omni
                text: Json = {"audio": {"transcript": part.text}}
                deltas.append(text if spoken else {"content": part.text})
            else:
                deltas.append({"tool_calls": [{"index": len(self._calls), **_call(part)}]})
                self._calls.append(part)
        return deltas

    def _sound(self, chunk: AudioChunk) -> Json:
        """Return the delta of a chunk: with one header in all, or for vllm-omni's a file each."""
        data = pcm16(chunk.samples)
        if self._vllm_omni:
            file = wav_header(SAMPLE_RATE, len(data)) + data
            return {"content": base64.b64encode(file).decode("ascii"), "modality": "audio"}
        if self._wanted.sound_format == "wav" and not self._headed:
            data = wav_header(SAMPLE_RATE) + data
        self._headed = True
        return {"audio": {"data": base64.b64encode(data).decode("ascii")}}

    def _finish(self, result: SpeechResult) -> None:
        text = "".join(self._texts)
        if self._speaks:
            self._service.replies.keep(self._audio_id, self._expires_at, self._context.owner, text)
        self._context.finished(result, text if self._service.settings.log_content else None)
        self._service.metrics.finished(result, self.player, cached_tokens(result.timings))

    def _finish_reason(self) -> str:
        assert self._result is not None, "an answer that has ended"
        if self._calls:
            return "tool_calls"
        reasons = self._result.thinker_finish_reason, self._result.talker_finish_reason
        return "length" if "length" in reasons else "stop"

    def _usage(self) -> Json:
        assert self._result is not None, "an answer that has ended"
        return usage_of(self._result.timings, self._reasoning_tokens)

    def _piece(self, delta: Json, finish_reason: str | None = None) -> bytes:
        modality = delta.pop("modality", None)
        if modality is None:
            modality = "audio" if "data" in (delta.get("audio") or {}) else "text"
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return json_event(self._frame([choice]) | {"modality": modality})

    def _frame(self, choices: list[Json], kind: str = "chat.completion.chunk") -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._wanted.model,
            "system_fingerprint": f"qwen3-omni-neuron-{__version__}",
            "choices": choices,
        }


def usage_of(timings: Timings, reasoning_tokens: int = 0) -> Json:
    """Return the usage of a reply. Audio tokens are those of the prompt, and frames of speech."""
    prompt, completion = timings.prompt_tokens, timings.text_tokens + timings.frames
    media = timings.prompt_audio_tokens + timings.prompt_image_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "text_tokens": prompt - media,
            "audio_tokens": timings.prompt_audio_tokens,
            "image_tokens": timings.prompt_image_tokens,
            "cached_tokens": cached_tokens(timings),
        },
        "completion_tokens_details": {
            "text_tokens": timings.text_tokens,
            "audio_tokens": timings.frames,
            "reasoning_tokens": reasoning_tokens,
        },
    }


def cached_tokens(timings: Timings) -> int:
    """Return how many of the prompt's rows an earlier request had computed."""
    return timings.reused_tokens


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
