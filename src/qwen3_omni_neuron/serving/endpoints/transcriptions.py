"""POST /v1/audio/transcriptions: a sound file in, its transcript out, whole or streamed."""

import html
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from qwen3_omni_neuron.events import Finished, TextDelta, Timings
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.forms import read_form
from qwen3_omni_neuron.serving.endpoints.answer import PieceStream, json_event
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.endpoints.served_stream import ServedStream
from qwen3_omni_neuron.serving.openai.bodies import (
    bounded_options,
    check_model,
    refused_field,
    wrong_value,
)
from qwen3_omni_neuron.serving.openai.openapi import errors_of, form_of
from qwen3_omni_neuron.serving.openai.usage import (
    duration_usage,
    logprob_entries,
    transcription_usage,
)
from qwen3_omni_neuron.serving.openai.without_effect import TRANSCRIPTIONS
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.transcription import Segment, Window, read_windows, stream_transcript

router = APIRouter()
Json = dict[str, Any]
_SEEK_S = 0.01  # unit of a segment's `seek`
_MEDIA_TYPES = {
    **dict.fromkeys(("json", "verbose_json"), "application/json"),
    **dict.fromkeys(("text", "srt"), "text/plain"),
    "vtt": "text/vtt",
}


class TranscriptionRequest(BaseModel):
    """Fields of POST /v1/audio/transcriptions, beside the file.

    instruction: text that follows the audio in the question, in place of the checkpoint's own.
    max_new_tokens: most tokens of text, of each window where there are several.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    stream: bool = False
    language: str = Field("unknown", max_length=40)
    languages: list[str] = []
    keywords: list[str] = []
    include: list[Literal["logprobs"]] = []
    temperature: float = Field(0, ge=0, le=1)
    prompt: str = ""
    timestamp_granularities: list[Literal["segment", "word"]] = []
    chunking_strategy: Literal["", "auto"] = ""
    instruction: str | None = None
    max_new_tokens: int = Field(RequestOptions.thinker_max_new_tokens, ge=1)

    @property
    def in_windows(self) -> bool:
        """True if the audio is split into windows that are transcribed separately."""
        timed = self.response_format in ("verbose_json", "srt", "vtt")
        return timed or self.chunking_strategy == "auto"


@router.post(
    "/v1/audio/transcriptions",
    openapi_extra=form_of(TranscriptionRequest, "file"),
    responses=errors_of(with_body=True),
)
async def transcriptions(request: Request) -> Response:
    """Transcribe a sound file."""
    service: Service = request.app.state.service
    context: Context = request.scope["context"]
    context.param = "file"
    content_type = request.headers.get("content-type", "")
    wanted, media, item = await service.model.in_thread(_read, service, context, content_type)
    await media.finish(context.account.hold)
    context.release_body()
    windows = await service.model.in_thread(read_windows, item, wanted.in_windows)
    del item, media
    context.wanted(wanted.stream, False)
    transcription = Transcription(wanted, windows, service, context)
    if wanted.stream:
        return PieceStream(transcription.events())
    async with aclosing(transcription.deltas()) as deltas:
        async for _ in deltas:
            pass
    return Response(transcription.whole(), media_type=_MEDIA_TYPES[wanted.response_format])


def _read(
    service: Service, context: Context, content_type: str
) -> tuple[TranscriptionRequest, MediaReader, Json]:
    """Parse a request, and decode its file if that needs no codec. Raises ApiError.

    Returns the request's fields, the reader of its file, and the audio item that it fills.
    """
    form = read_form(context.body, content_type)
    try:
        wanted = TranscriptionRequest.model_validate(form.fields)
    except ValidationError as error:
        raise refused_field(error) from error
    check_model(service, wanted.model)
    if wanted.stream and wanted.response_format not in ("json", "text"):
        raise wrong_value(
            f"{wanted.response_format} can't be streamed. Take json, or stream: false.", "stream"
        )
    if wanted.include and wanted.response_format != "json":
        raise wrong_value("include: logprobs come with response_format json alone.", "include")
    if "word" in wanted.timestamp_granularities:
        raise wrong_value(
            "timestamp_granularities: word is not there, since the model writes words without "
            "their times. Take segment: a segment is at most 8 s long.",
            "timestamp_granularities",
        )
    if wanted.timestamp_granularities and wanted.response_format != "verbose_json":
        raise wrong_value(
            "timestamp_granularities needs response_format verbose_json.",
            "timestamp_granularities",
        )
    content = form.files.pop("file", None)
    if content is None or form.files:
        raise wrong_value("the form needs one file, under the name file.", "file")
    service.count_without_effect(TRANSCRIPTIONS, wanted)
    media = MediaReader(
        service, context.omni, context.owner, param="file", in_windows=wanted.in_windows
    )
    context.warnings = media.warnings
    item = media.sound_file(content, "file")
    media.finish_inline(context.account.hold)
    return wanted, media, item


class Transcription:
    """One answer. text: transcript so far."""

    def __init__(
        self,
        wanted: TranscriptionRequest,
        windows: list[Window],
        service: Service,
        context: Context,
    ):
        self._wanted, self._windows = wanted, windows
        self._service, self._context = service, context
        self.text = ""
        self._segments: list[Segment] = []
        self._averages: list[float] = []  # mean log-probability of each segment's tokens
        self._logprobs: list[Json] = []
        self._timings: list[Timings] = []
        self._options = bounded_options({}, service.settings, context.owner)
        logprobs = bool(wanted.include) or wanted.response_format == "verbose_json"
        self._options |= {"literal_text": True, "logprobs": logprobs}
        if wanted.temperature > 0:
            self._options |= {"thinker_do_sample": True}
            self._options |= {"thinker_temperature": max(wanted.temperature, 1e-6)}

    async def deltas(self) -> AsyncGenerator[tuple[str, list[Json]], None]:
        """Yield the text, one window after the other, so that a request has at most one slot.

        Each part comes with the entries of its log-probabilities, where they are computed.
        """
        for window in self._windows:
            segment = Segment(window.start_s, window.end_s, "", [])
            served = ServedStream(await self._start(window), self._service)
            with closing(served):
                async for (event,) in served:
                    if isinstance(event, TextDelta) and event.text:
                        delta = event.text if segment.text or not self.text else f" {event.text}"
                        self.text += delta
                        entries = logprob_entries(event)
                        self._logprobs += entries
                        yield delta, entries
                        text, token_ids = segment.text, segment.token_ids
                        segment = replace(
                            segment, text=text + event.text, token_ids=token_ids + event.token_ids
                        )
                    elif isinstance(event, Finished):
                        self._timings.append(event.result.timings)
                        self._averages.append(float(np.mean(event.result.logprobs or [0.0])))
            self._segments.append(segment)
        self._context.place.leave()
        self._context.fields |= {
            "windows": len(self._windows),
            "prompt_tokens": sum(timings.prompt_tokens for timings in self._timings),
            "text_tokens": sum(timings.text_tokens for timings in self._timings),
        }
        if self._service.settings.log_content:
            self._context.answer = self.text

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text as server-sent events, then an event with the whole text and usage."""
        async with aclosing(self.deltas()) as deltas:
            async for delta, entries in deltas:
                event = {"type": "transcript.text.delta", "delta": delta}
                yield json_event(event | self._included(entries))
        done = {
            "type": "transcript.text.done",
            "text": self.text,
            "usage": transcription_usage(self._timings),
        }
        yield json_event(done | self._included(self._logprobs))

    def whole(self) -> bytes:
        """Return the answer in the requested format."""
        wanted = self._wanted.response_format
        if wanted == "text":
            return f"{self.text}\n".encode()
        if wanted == "srt":
            return "".join(_srt_cues(self._segments)).encode()
        if wanted == "vtt":
            return "".join(("WEBVTT\n\n", *_vtt_cues(self._segments))).encode()
        if wanted == "json":
            short = {"text": self.text, "usage": transcription_usage(self._timings)}
            return to_json(short | self._included(self._logprobs))
        seconds = round(self._windows[-1].end_s, 3)
        segments = map(self._verbose, range(len(self._segments)), self._segments)
        answer = {
            "task": "transcribe",
            "language": self._wanted.language,
            "duration": seconds,
            "text": self.text,
            "segments": list(segments),
            "usage": duration_usage(seconds),
        }
        return to_json(answer)

    def _included(self, entries: list[Json]) -> Json:
        return {"logprobs": entries} if self._wanted.include else {}

    async def _start(self, window: Window) -> SpeechStream:
        """Start a window's request. It uses the place of this HTTP request in the quota."""
        wanted = self._wanted
        start = partial(
            stream_transcript,
            self._context.omni,
            window.audio,
            wanted.instruction,
            wanted.max_new_tokens,
            **self._options,
        )
        return await self._service.model.start(start)

    def _verbose(self, number: int, segment: Segment) -> Json:
        """Return a segment with all fields of OpenAI's; no_speech_prob, not measured, is zero."""
        data = segment.text.encode()
        return {
            "id": number,
            "seek": round(segment.start_s / _SEEK_S),
            "start": round(segment.start_s, 3),
            "end": round(segment.end_s, 3),
            "text": segment.text,
            "tokens": segment.token_ids,
            "temperature": self._wanted.temperature,
            "avg_logprob": self._averages[number],
            "compression_ratio": round(len(data) / len(zlib.compress(data)), 3),
            "no_speech_prob": 0.0,
        }


def _srt_cues(segments: Sequence[Segment]) -> Iterator[str]:
    for number, segment in enumerate(segments, 1):
        start, end = (_time(s).replace(".", ",") for s in (segment.start_s, segment.end_s))
        yield f"{number}\n{start} --> {end}\n{_one_line(segment.text)}\n\n"


def _vtt_cues(segments: Sequence[Segment]) -> Iterator[str]:
    for segment in segments:
        text = html.escape(_one_line(segment.text), quote=False)
        yield f"{_time(segment.start_s)} --> {_time(segment.end_s)}\n{text}\n\n"


def _one_line(text: str) -> str:
    """Return a text without empty lines, since an empty line ends a cue."""
    return " ".join(text.split())


def _time(seconds: float) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds / 1000:06.3f}"
