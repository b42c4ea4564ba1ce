"""POST /v1/chat/completions: a conversation in, text and speech out, whole or streamed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pybase64
from fastapi import APIRouter, Request
from fastapi.responses import Response

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event
from qwen3_omni_neuron.events.encoding import pcm16, wav_header
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import (
    DONE,
    Question,
    Reply,
    answer,
    json_event,
    parts_of,
)
from qwen3_omni_neuron.serving.endpoints.sound import SoundEncoder, encode_sound
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai.bodies import SMALL_BODY_BYTES, check_model, parse_json
from qwen3_omni_neuron.serving.openai.chat_request import ChatRequest, NamedTool
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import CHAT
from qwen3_omni_neuron.serving.openai.openapi import errors_of, takes_json
from qwen3_omni_neuron.serving.openai.reply import (
    Call,
    Content,
    Reasoning,
    ReplyPart,
    chat_usage,
    new_id,
    running_usage,
)
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()
_CHUNK = "chat.completion.chunk"
Json = dict[str, Any]


@router.post(CHAT, **takes_json(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation in text, and in speech if `modalities` has audio."""
    service, context = parts_of(request)
    waits = len(context.body) > SMALL_BODY_BYTES
    return await answer(service, context, partial(_read, service, context), waits)


@router.delete("/v1/chat/completions/{completion_id}", responses=errors_of(404))
async def delete_chat_completion(request: Request, completion_id: str) -> Json:
    """Delete a spoken reply's transcript; later turns can't name it."""
    service, context = parts_of(request)
    audio_id, _ = service.replies.named(completion_id)
    if not service.replies.delete(context.owner, audio_id):
        message = (
            f"no spoken reply of {completion_id[:80]!r} is stored: it expired, was deleted, or "
            "never existed."
        )
        raise ApiError(404, message, "completion_not_found")
    return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}


def _read(service: Service, context: Context) -> Question:
    wanted = parse_json(ChatRequest, context.body)
    check_model(service, wanted.model)
    question = Question(wanted, ChatReply, service, context)
    service.count_without_effect(CHAT, wanted)
    return question


class ChatReply(Reply):
    """Answer in the format of chat completions."""

    def __init__(self, question: Question, stream: SpeechStream):
        super().__init__(question, stream)
        wanted = self.wanted
        self._id = new_id("chatcmpl-")
        self._audio_id, self._expires_at = self._service.replies.named(self._id)
        self._voice = question.options.get("speaker", RequestOptions.speaker)
        # vllm-omni's clients read `content`: text, or a whole WAV file in base64.
        self._in_audio = wanted.speaks and not wanted.in_vllm_omnis_way
        self._encoder: SoundEncoder | None = None  # from the first chunk on
        frame = to_json(self._completion(_CHUNK, [])).removesuffix(b"[]}")
        self._before_delta = b"data: " + frame + b'[{"index":0,"delta":'

    def _first(self) -> list[bytes]:
        first: Json = {"role": "assistant", "content": "" if not self._in_audio else None}
        if self._in_audio:
            first["audio"] = {"id": self._audio_id, "voice": self._voice}
        return [self._piece(first)]

    async def _next(self, events: Sequence[Event]) -> list[bytes]:
        parts, chunk = self._take(events)
        pieces = [self._part(part) for part in parts]
        if chunk is not None:
            sound = await self._encoded(chunk)
            if sound:
                pieces.append(self._sound(sound))
        return pieces

    def _last(self) -> list[bytes]:
        audio = {"audio": {"expires_at": self._expires_at}}
        rest = b"" if self._encoder is None else self._encoder.finish()
        pieces = [self._sound(rest)] if rest else []
        if self._in_audio:
            pieces.append(self._piece(audio))
        # vllm-omni's clients print the content of every piece with text.
        last = {"content": ""} if self.wanted.in_vllm_omnis_way else {}
        pieces.append(self._piece(last, self._finish_reason()))
        options = self.wanted.stream_options
        if options is not None and options.include_usage:
            pieces.append(json_event(self._completion(_CHUNK, []) | {"usage": self._usage()}))
        return [*pieces, DONE]

    def whole(self) -> bytes:
        """Return the chat completion."""
        text, speaks = "".join(self._texts), self.wanted.speaks and not self._calls
        # vllm-omni's clients print the text. OpenAI's, which send `audio`, show the transcript.
        shown = not speaks or self.wanted.in_vllm_omnis_way
        empty = None if speaks or self._calls else ""
        content = text or empty if shown else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._reasons:
            message["reasoning_content"] = "".join(self._reasons)
        if self._calls:
            message["tool_calls"] = [_call(call) for call in self._calls]
        if speaks:
            sound = encode_sound(self._ended.audio, self.wanted.sound_format)
            message["audio"] = {
                "id": self._audio_id,
                "voice": self._voice,
                "data": pybase64.b64encode(sound).decode("ascii"),
                "expires_at": self._expires_at,
                "transcript": text,
            }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._told(self._logprobs),
            "finish_reason": self._finish_reason(),
        }
        answer = self._completion("chat.completion", [choice]) | {"usage": self._usage()}
        if self._context.warnings:
            answer["warnings"] = self._context.warnings
        return to_json(answer)

    def _told(self, logprobs: Sequence[Json]) -> Json | None:
        """Return a choice's log-probabilities; None unless requested."""
        return {"content": logprobs, "refusal": None} if self.wanted.logprobs else None

    def _part(self, part: ReplyPart) -> bytes:
        logprobs = self._told(part.logprobs) if isinstance(part, Content) else None
        return self._event((to_json(self._delta(part)),), "text", logprobs=logprobs)

    def _delta(self, part: ReplyPart) -> Json:
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, Call):
            return {"tool_calls": [{"index": self._calls.index(part), **_call(part)}]}
        return {"audio": {"transcript": part.text}} if self._in_audio else {"content": part.text}

    async def _encoded(self, chunk: AudioChunk) -> bytes:
        if not self._in_audio:
            data = pcm16(chunk.samples)
            return wav_header(SAMPLE_RATE, len(data)) + data
        if self._encoder is None:
            self._encoder = SoundEncoder(self.wanted.sound_format)
        return await self._encoder.encode(chunk.samples)

    def _sound(self, data: bytes) -> bytes:
        before, after = (
            (b'{"audio":{"data":"', b'"}}') if self._in_audio else (b'{"content":"', b'"}')
        )
        return self._event((before, pybase64.b64encode(data), after), "audio")

    def _finish(self) -> None:
        """Store the complete reply's transcript for later turns and the log."""
        super()._finish()
        if self.wanted.speaks:
            text = "".join(self._texts)
            self._service.replies.keep(self._audio_id, self._context.owner, text)

    def _finish_reason(self) -> str:
        if self._reached_limit:
            return "length"
        # As OpenAI: a client that named the function expects the call.
        named = isinstance(self.wanted.tool_choice, NamedTool)
        return "tool_calls" if self._calls and not named else "stop"

    def _usage(self) -> Json:
        return chat_usage(self._ended.timings, self._reasoning_tokens)

    def _piece(self, delta: Json, finish_reason: str | None = None) -> bytes:
        return self._event((to_json(delta),), "text", finish_reason)

    def _event(
        self,
        delta: Sequence[bytes],
        modality: str,
        finish_reason: str | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        """Return an event. The text shared by all events is written once.

        delta: parts of its JSON, perhaps as long as a chunk, copied once.
        """
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        told = b"null" if logprobs is None else to_json(logprobs)
        end = f',"finish_reason":{reason}}}],"modality":"{modality}"'.encode()
        options = self.wanted.stream_options
        if options is not None and options.include_usage:
            made = running_usage(self._prompt_tokens, self._made) if options.continuous else None
            end += b',"usage":' + to_json(made)
        return b"".join((self._before_delta, *delta, b',"logprobs":', told, end, b"}\n\n"))


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
