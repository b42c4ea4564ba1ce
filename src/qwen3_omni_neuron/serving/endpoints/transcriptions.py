"""POST /v1/audio/transcriptions: a sound file in, its text out."""

import html
import time
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json

from qwen3_omni_neuron.events import Finished, FinishReason, TextDelta, Timings
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.media.windows import SAMPLING_RATE, Window
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.forms import read_form
from qwen3_omni_neuron.serving.endpoints.answer import (
    PieceStream,
    ServedStream,
    json_event,
    parts_of,
)
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai.bodies import ClientObject, check_model, refused_field
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.serving.openai.fields import (
    ENGINE_FIELDS,
    TRANSCRIPTIONS,
    bounded_options,
    check_lengths,
    engine_options,
)
from qwen3_omni_neuron.serving.openai.openapi import takes_form
from qwen3_omni_neuron.serving.openai.reply import (
    duration_usage,
    logprob_entries,
    running_usage,
    transcription_usage,
)
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.transcription import (
    JoinedText,
    Segment,
    reason_of,
    stream_window,
    windows_for,
)

router = APIRouter()
Json = dict[str, Any]
_SEEK_S = 0.01  # unit of a segment's `seek`
_MEDIA_TYPES = {
    **dict.fromkeys(("json", "verbose_json"), "application/json"),
    **dict.fromkeys(("text", "srt"), "text/plain"),
    "vtt": "text/vtt",
}


class TranscriptionRequest(ClientObject):
    """Fields of POST /v1/audio/transcriptions, beside the file.

    instruction: text after the audio, instead of the default. max_new_tokens: limit of each
    window's text; engines' clients call it max_completion_tokens.
    """

    model_config = ConfigDict(strict=False)  # a form's values are text
    further = ENGINE_FIELDS
    model: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: float = Field(0, ge=0, le=1)
    prompt: str = ""
    instruction: str | None = None
    max_new_tokens: int = Field(RequestOptions.thinker_max_new_tokens, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    top_p: float = Field(1, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    stream: bool = False
    language: str = Field("unknown", max_length=40)
    languages: list[str] = Field([])
    keywords: list[str] = Field([])
    include: list[Literal["logprobs"]] = Field([])
    timestamp_granularities: list[Literal["segment", "word"]] = Field([])
    chunking_strategy: Literal["", "auto"] = ""
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False

    @property
    def options(self) -> Json:
        """Options of a window's request."""
        logprobs = bool(self.include) or self.response_format == "verbose_json"
        made: Json = {"literal_text": True, "logprobs": logprobs}
        made["thinker_max_new_tokens"] = self.max_completion_tokens or self.max_new_tokens
        made["thinker_do_sample"] = self.temperature > 0
        if self.temperature > 0:
            made["thinker_temperature"] = max(self.temperature, 1e-6)
        if self.top_p < 1:
            made["thinker_top_p"] = max(self.top_p, 1e-6)
        return made if self.seed is None else made | {"seed": self.seed}

    @property
    def timed(self) -> bool:
        """True for windows of a transcript with times."""
        timed = self.response_format in ("verbose_json", "srt", "vtt")
        return timed or self.chunking_strategy == "auto"

    def check(self) -> None:
        """Raise ApiError for fields that exclude each other."""
        if self.stream and self.response_format not in ("json", "text"):
            raise wrong_value(
                f"{self.response_format} can't be streamed. Use json, or stream: false.", "stream"
            )
        if self.include and self.response_format != "json":
            raise wrong_value("include: logprobs need response_format json.", "include")
        if "word" in self.timestamp_granularities:
            message = (
                "timestamp_granularities: word is not supported: the model gives words no times. "
                "Use segment: a segment is at most 8 s long."
            )
            raise wrong_value(message, "timestamp_granularities")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            message = "timestamp_granularities needs response_format verbose_json."
            raise wrong_value(message, "timestamp_granularities")


@router.post(TRANSCRIPTIONS, **takes_form(TranscriptionRequest, "file"))
async def transcriptions(request: Request) -> Response:
    """Transcribe a sound file."""
    service, context = parts_of(request)
    context.param = "file"
    content_type = request.headers.get("content-type", "")
    in_thread = partial(service.readers.run, context.owner)
    wanted, options, media, item = await in_thread(_read, service, context, content_type)
    await media.finish(context.account.hold)
    context.release_body()
    sound = windows_for(context.omni, wanted.timed)
    windows = await in_thread(sound.push, item["audio"]) + await in_thread(sound.finish)
    del item, media
    context.wanted(wanted.stream, False)
    seconds = sound.length / SAMPLING_RATE
    transcription = Transcription(wanted, options, windows, seconds, service, context)
    if wanted.stream:
        as_engines = wanted.stream_include_usage or wanted.stream_continuous_usage_stats
        return PieceStream(transcription.chunks() if as_engines else transcription.events())
    async with aclosing(transcription.deltas()) as deltas:
        async for _ in deltas:
            pass
    return Response(
        transcription.whole(),
        media_type=_MEDIA_TYPES[wanted.response_format],
        headers={"x-finish-reason": transcription.finish_reason},
    )


def _read(
    service: Service, context: Context, content_type: str
) -> tuple[TranscriptionRequest, Json, MediaReader, Json]:
    """Parse a request; decode its file if that needs no codec. Raises ApiError.

    Returns its fields, a window's options, the file's reader, and its item.
    """
    form = read_form(context.body, content_type)
    try:
        wanted = TranscriptionRequest.model_validate(form.fields)
    except ValidationError as error:
        raise refused_field(error) from error
    check_model(service, wanted.model)
    wanted.check()
    engines = {name: _value_of(text) for name, text in (wanted.model_extra or {}).items()}
    options = wanted.options | engine_options(engines, context.omni.info.thinks)
    options = bounded_options(options, service.settings, context.owner)
    check_lengths(options)
    content = form.files.pop("file", None)
    if content is None or form.files:
        raise wrong_value("the form needs one file, in the field file.", "file")
    service.count_without_effect(TRANSCRIPTIONS, wanted)
    media = MediaReader(service, context.omni, context.owner, param="file", in_windows=True)
    context.warnings = media.warnings
    item = media.add("audio", content, "file", {})
    media.finish_inline(context.account.hold)
    return wanted, options, media, item


class Transcription:
    """One answer: the windows' text, while it is written."""

    def __init__(
        self,
        wanted: TranscriptionRequest,
        options: Json,
        windows: list[Window],
        seconds: float,
        service: Service,
        context: Context,
    ):
        """options: of windows' requests. seconds: duration of the sound."""
        self._wanted, self._options = wanted, options
        self._windows, self._seconds = windows, round(seconds, 3)
        self._service, self._context = service, context
        self._joined, self._segments = JoinedText(), list[Segment]()
        self._logprobs: list[Json] = []

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the text so far."""
        return reason_of(self._segments)

    async def deltas(self) -> AsyncGenerator[tuple[str, list[Json]], None]:
        """Yield text and log-probabilities, window by window: a request has one slot."""
        omni, instruction = self._context.omni, self._wanted.instruction
        for window in self._windows:
            start = partial(stream_window, omni, window, instruction, **self._options)
            stream = await self._service.readers.run(self._context.owner, start)
            with closing(ServedStream(stream, self._service)) as served:
                async for (event,) in served:
                    if isinstance(event, TextDelta) and event.text:
                        entries = logprob_entries(event)
                        self._logprobs += entries
                        yield self._joined.add(event.text), entries
                    elif isinstance(event, Finished):
                        self._segments.append(Segment.of(window, event.result))
            self._joined.end_window()
        self._context.place.leave()
        self._context.fields |= {
            "windows": len(self._windows),
            "prompt_tokens": sum(timings.prompt_tokens for timings in self._timings),
            "text_tokens": sum(timings.text_tokens for timings in self._timings),
            "finish": self.finish_reason,
        }
        if self._service.settings.log_content:
            self._context.answer = self._joined.text

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text as server-sent events, then one with the whole text and usage."""
        async with aclosing(self.deltas()) as deltas:
            async for delta, entries in deltas:
                event = {"type": "transcript.text.delta", "delta": delta}
                yield json_event(event | self._probabilities(entries))
        yield json_event({"type": "transcript.text.done", **self._short()})

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the text in vLLM's form, whose clients request a stream's usage."""
        async with aclosing(self.deltas()) as deltas:
            async for delta, _ in deltas:
                yield json_event(self._chunk({"content": delta}, None))
        usage = transcription_usage(self._timings)
        told = running_usage(usage["input_tokens"], usage["output_tokens"])
        last = self._chunk({}, self.finish_reason)
        end = json_event(last | {"choices": [], "usage": told})
        yield json_event(last) + end + b"data: [DONE]\n\n"

    def _chunk(self, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {
            "id": f"trsc-{self._context.request_id}",
            "object": "transcription.chunk",
            "created": int(time.time()),
            "model": self._service.model.name,
            "choices": [choice],
        }

    def whole(self) -> bytes:
        """Return the answer in the requested format."""
        wanted = self._wanted.response_format
        if wanted == "text":
            return f"{self._joined.text}\n".encode()
        if wanted == "srt":
            return "".join(_cues(self._segments, as_vtt=False)).encode()
        if wanted == "vtt":
            return "".join(("WEBVTT\n\n", *_cues(self._segments, as_vtt=True))).encode()
        if wanted == "json":
            return to_json(self._short())
        return to_json(
            {
                "task": "transcribe",
                "language": self._wanted.language,
                "duration": self._seconds,
                "text": self._joined.text,
                "segments": [self._verbose(*made) for made in enumerate(self._segments)],
                "finish_reason": self.finish_reason,
                "usage": duration_usage(self._seconds),
            }
        )

    @property
    def _timings(self) -> list[Timings]:
        return [segment.timings for segment in self._segments]

    def _short(self) -> Json:
        usage = transcription_usage(self._timings)
        fields = {"text": self._joined.text, "finish_reason": self.finish_reason, "usage": usage}
        return fields | self._probabilities(self._logprobs)

    def _probabilities(self, entries: list[Json]) -> Json:
        return {"logprobs": entries} if self._wanted.include else {}

    def _verbose(self, number: int, segment: Segment) -> Json:
        """Return a segment with all of OpenAI's fields, and its finish reason."""
        data = segment.text.encode()
        return {
            "id": number,
            "seek": round(segment.start_s / _SEEK_S),
            "start": round(segment.start_s, 3),
            "end": round(segment.end_s, 3),
            "text": segment.text,
            "tokens": segment.token_ids,
            "temperature": self._wanted.temperature,
            "avg_logprob": float(np.mean(segment.logprobs or [0.0])),
            "compression_ratio": round(len(data) / len(zlib.compress(data)), 3),
            "no_speech_prob": 0.0,  # it is not computed
            "finish_reason": segment.finish_reason,
        }


def _value_of(text: str | list[str]) -> Any:
    """Return a form field's value: its text read as JSON, or the text."""
    if isinstance(text, list):
        return [_value_of(one) for one in text]
    if text in ("True", "False"):  # written by Python's clients
        return text == "True"
    try:
        return from_json(text, allow_inf_nan=False) if text else None
    except ValueError:
        return text


def _cues(segments: Sequence[Segment], as_vtt: bool) -> Iterator[str]:
    for number, segment in enumerate(segments, 1):
        times = f"{_time(segment.start_s)} --> {_time(segment.end_s)}"
        text = " ".join(segment.text.split())  # an empty line ends a cue
        if as_vtt:
            yield f"{times}\n{html.escape(text, quote=False)}\n\n"
        else:
            yield f"{number}\n{times.replace('.', ',')}\n{text}\n\n"


def _time(seconds: float) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds / 1000:06.3f}"
