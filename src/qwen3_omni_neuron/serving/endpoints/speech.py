"""POST /v1/audio/speech: a text in, its speech out, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

import pybase64
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from qwen3_omni_neuron.events import AudioChunk, Finished, FinishReason
from qwen3_omni_neuron.options import SpeechArguments
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import (
    EVENTS,
    PieceStream,
    ServedStream,
    json_event,
    parts_of,
)
from qwen3_omni_neuron.serving.endpoints.sound import MEDIA_TYPES, SoundEncoder, Tempo
from qwen3_omni_neuron.serving.openai import bodies
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import SPEECH, Seed, VoiceName, bounded_options
from qwen3_omni_neuron.serving.openai.openapi import schemas_of_options, takes_json
from qwen3_omni_neuron.serving.openai.reply import speech_usage
from qwen3_omni_neuron.serving.service import Service

MOST_CHARACTERS = 32_768  # half an hour of speech
SMALL_TEXT_BYTES = 1 << 10  # a smaller body is split into pieces within 2 ms

router = APIRouter()


class SpeechRequest(bodies.ClientObject):
    """Body of POST /v1/audio/speech. Further fields are options of `options.SpeechArguments`."""

    further = schemas_of_options({*get_type_hints(SpeechArguments)} - {"speaker", "seed", "owner"})
    model: str | None = None
    input: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    voice: VoiceName | None = None
    response_format: Annotated[
        Literal["mp3", "opus", "aac", "flac", "wav", "pcm"],
        bodies.lower_name(pcm16="pcm", ogg="opus"),
    ] = "mp3"
    speed: float = Field(1.0, ge=0.25, le=4)
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    instructions: str | None = Field(None, max_length=MOST_CHARACTERS)
    language: str | None = Field(None, max_length=80)
    seed: Seed | None = None

    @property
    def sound_format(self) -> str:
        """Format of the sound, by its name in `sound`."""
        return "pcm16" if self.response_format == "pcm" else self.response_format

    @property
    def in_events(self) -> bool:
        """True if the sound is sent in server-sent events."""
        return self.stream_format == "sse"

    @property
    def as_made(self) -> bool:
        """True if the sound is streamed while it is generated.

        On request only: a streamed WAV's header lacks its length. FLAC is sent at the end.
        """
        if self.response_format == "wav":
            return bool(self.stream_format or self.stream)
        return self.response_format != "flac"


@router.post(SPEECH, response_class=Response, **takes_json(SpeechRequest))
async def speech(request: Request) -> Response:
    """Speak a text."""
    service, context = parts_of(request)
    context.param = "input"
    if len(context.body) <= SMALL_TEXT_BYTES and not service.requests.crowds(context.owner):
        spoken = _start(service, context)
    else:
        spoken = await service.readers.run(context.owner, _start, service, context)
    context.release_body()
    wanted = spoken.wanted
    media_type = EVENTS if wanted.in_events else MEDIA_TYPES[wanted.sound_format]
    answer: Response
    if wanted.as_made or wanted.in_events:
        answer = PieceStream(spoken.pieces(), media_type)
    else:
        sound = b"".join([piece async for piece in spoken.pieces()])
        answer = Response(sound, media_type=media_type)
        answer.headers["x-finish-reason"] = spoken.finish_reason
    answer.headers["x-voice"] = spoken.speaker
    return answer


def _start(service: Service, context: Context) -> "SpokenText":
    wanted = bodies.parse_json(SpeechRequest, context.body)
    omni = context.omni
    bodies.check_model(service, wanted.model)
    voices = service.voices_of(omni)
    if voices.default is None:
        message = "this checkpoint has no talker: it can write text, not speak."
        raise ApiError(400, message, "no_speech", "model")
    speaker = voices.speaker(wanted.voice or voices.default, "voice")
    service.count_without_effect(SPEECH, wanted)
    if service.settings.log_content:
        context.question = wanted.input
    given = {**(wanted.model_extra or {}), "speaker": speaker, "seed": wanted.seed}
    options = bounded_options(given, service.settings, context.owner)
    context.wanted(wanted.as_made or wanted.in_events, True)
    start = partial(omni.stream_speech, wanted.input, **options)
    return SpokenText(wanted, start, speaker, service, context)


class SpokenText:
    """One answer, sent as pieces of a sound file or server-sent events.

    finish_reason: "length" once a limit has cut the speech.
    """

    def __init__(
        self,
        wanted: SpeechRequest,
        start: Callable[[], SpeechStream],
        speaker: str,
        service: Service,
        context: Context,
    ):
        self.wanted, self.speaker = wanted, speaker
        self.finish_reason: FinishReason = "stop"
        self._encoder = SoundEncoder(wanted.sound_format, whole=not wanted.as_made)
        self._tempo = None if wanted.speed == 1 else Tempo(wanted.speed)
        whole = not (wanted.as_made or wanted.in_events)
        self._served = ServedStream(start(), service, context, keeps_audio=whole)

    def close(self) -> None:
        """Cancel the request."""
        self._served.close()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the sound while it is generated, or in one piece at the end.

        The last event, if any are requested, has the finish reason and the usage.
        """
        done: dict[str, Any] = {"type": "speech.audio.done"}
        with closing(self._served) as served:
            async for (event,) in served:
                if isinstance(event, AudioChunk):
                    samples = self._tempo.push(event.samples) if self._tempo else event.samples
                    piece = await self._encoder.encode(samples)
                    if piece:
                        yield self._sent(piece)
                elif isinstance(event, Finished):
                    if event.result.talker_finish_reason == "length":
                        self.finish_reason = "length"
                    done["finish_reason"] = self.finish_reason
                    done["usage"] = speech_usage(event.result.timings)
                    piece = await asyncio.to_thread(self._last)
                    if piece or not self.wanted.in_events:
                        yield self._sent(piece)
        if self.wanted.in_events:
            yield json_event(done)

    def _sent(self, piece: bytes) -> bytes:
        if not self.wanted.in_events:
            return piece
        sound = pybase64.b64encode(piece).decode("ascii")
        return json_event({"type": "speech.audio.delta", "audio": sound})

    def _last(self) -> bytes:
        last = b"" if self._tempo is None else self._encoder.push(self._tempo.finish())
        return last + self._encoder.finish()
