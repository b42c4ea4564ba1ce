"""Transcription of audio of any length, window by window."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from qwen3_omni_neuron.errors import AudioError, LateError, PromptTooLongError
from qwen3_omni_neuron.events import (
    Finished,
    FinishReason,
    ModelInfo,
    ShortRepr,
    SpeechResult,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.options import INSTRUCTION, RequestArguments, RequestOptions
from qwen3_omni_neuron.prompt.media.windows import (
    LEAST_LONGEST_S,
    SAMPLING_RATE,
    TIMED_S,
    GrowingWindows,
    Window,
    read_windows,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

    # These import torch, needed only if a file can be opened.
    from qwen3_omni_neuron.prompt.media.pixels import MediaSettings
    from qwen3_omni_neuron.prompt.messages import Conversation
    from qwen3_omni_neuron.runtime.stream import SpeechStream

# 1,024 tokens are 34 per second, more than speech needs; longer windows have more errors.
LONGEST_S = 30.0
# Errors of one file. Others would recur in every file and end the run.
_FILE_ERRORS = (AudioError, PromptTooLongError, LateError)


class _Model(Protocol):
    """Part of api.Qwen3Omni that transcription uses."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def media_settings(self) -> "MediaSettings": ...
    @property
    def transcription_instruction(self) -> str | None: ...
    def stream_text(
        self, messages: "Conversation", **options: "Unpack[RequestArguments]"
    ) -> "SpeechStream": ...


@dataclass(frozen=True)
class Segment:
    """Transcript of one window of an audio.

    start_s, end_s: place in the audio. token_ids: without the end token. finish_reason: "stop" (the
    model ended the text), or "length" (max_new_tokens or the context did). logprobs: see
    SpeechResult. timings: the request's.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]
    timings: Timings

    @staticmethod
    def of(window: Window, result: SpeechResult) -> "Segment":
        """Return the segment of a window and its request's result."""
        token_ids, reason = result.token_ids, result.thinker_finish_reason
        return Segment(
            window.start_s,
            window.end_s,
            result.text,
            token_ids[:-1] if reason == "stop" else token_ids,
            reason,
            result.logprobs,
            result.timings,
        )


@dataclass(frozen=True, repr=False)
class Transcript(ShortRepr):
    """Transcript of one file.

    file: as passed. audio_s: duration. ttft_s, total_s: from opening the file to the first and last
    token, or to the end of a file without sound. rtf: total_s / audio_s; below 1 is faster than
    real time. finish_reason: "length" if a limit ended a window's text, else "stop". warnings:
    sentences about parts that were ignored or changed.
    """

    file: Any
    text: str
    audio_s: float
    ttft_s: float
    total_s: float
    rtf: float
    finish_reason: FinishReason
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """Error of a file without a transcript."""

    file: Any
    error: Exception


class JoinedText:
    """Text of consecutive windows, separated by spaces."""

    def __init__(self) -> None:
        self.text = ""
        self._parts = False

    def add(self, text: str) -> str:
        """Add the next part of a window's text; return it, after a space if needed."""
        delta = f" {text}" if self._parts and text else text
        self._parts &= not text
        self.text += delta
        return delta

    def end_window(self) -> None:
        """Let a space precede the next text."""
        self._parts = bool(self.text)


def transcribe(
    omni: _Model,
    files: Sequence[Any],
    instruction: str | None = None,
    concurrency: int = 1,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
) -> Generator[Transcript | Failure, None, None]:
    """Transcribe files greedily, and yield the outcomes in their order.

    files: each a path, a file's bytes, or (samples, sampling rate); longer ones than LONGEST_S are
    cut into windows (prompt.media.windows), without silence. instruction: see `stream_window`.
    concurrency: windows at a time, at least 1; a model with fewer slots (max_concurrency) queues
    the others. max_new_tokens: limit of each window's text. A file that can't be read, exceeds the
    context or misses a deadline gives a Failure.
    Raises OptionError, MessageError, ClosedError or EngineDiedError, which concern every file.
    Closing the iterator drops pending windows.
    """

    def transcribe_window(work: _FileWork, window: Window) -> None:
        begun_s = time.perf_counter()
        try:
            if work.error is None:
                with stream_window(omni, window, instruction, max_new_tokens) as stream:
                    result = next(e.result for e in stream if isinstance(e, Finished))
                work.made.append((begun_s, Segment.of(window, result)))
        except _FILE_ERRORS as error:
            work.error = error

    # Begun windows, and ends of files, in order. A thread per request consumes its tokens as they
    # arrive, so that times are true; the model runs them as one batch.
    begun = deque[Future[None] | _FileWork]()
    pool = ThreadPoolExecutor(concurrency, "transcribe")

    def outcomes(most: int) -> Iterator[Transcript | Failure]:
        while len(begun) > most:
            first = begun.popleft()
            if isinstance(first, _FileWork):
                yield first.outcome()
            else:
                first.result()

    try:
        for file in files:
            work = _FileWork(file, windows_for(omni, timed=False))
            for window in work.windows():
                begun.append(pool.submit(transcribe_window, work, window))
                yield from outcomes(2 * concurrency)
            begun.append(work)
            yield from outcomes(2 * concurrency)
        yield from outcomes(0)
    finally:
        # Without waiting: running requests end with the model.
        pool.shutdown(wait=False, cancel_futures=True)


def stream_transcript(
    omni: _Model,
    audio: Mapping[str, Any],
    instruction: str | None = None,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
    timed: bool = False,
    **options: "Unpack[RequestArguments]",
) -> Generator[TextDelta | Segment, None, None]:
    """Transcribe one audio greedily; yield each TextDelta, and a Segment per window.

    audio: an audio item of a message, such as {"audio": path or bytes}. timed: windows of at most
    TIMED_S. options: a request's. Others: see `transcribe`. The deltas' texts joined are the whole
    text. Raises the errors of Qwen3Omni.stream. Closing it ends its request.
    """
    joined = JoinedText()
    for window in read_windows(audio, windows_for(omni, timed), "audio"):
        with stream_window(omni, window, instruction, max_new_tokens, **options) as stream:
            for event in stream:
                if isinstance(event, TextDelta):
                    yield replace(event, text=joined.add(event.text))
                elif isinstance(event, Finished):
                    yield Segment.of(window, event.result)
        joined.end_window()


def stream_window(
    omni: _Model,
    window: Window,
    instruction: str | None = None,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
    **options: "Unpack[RequestArguments]",
) -> "SpeechStream":
    """Transcribe one window, greedily unless `options` say otherwise.

    instruction: text after the audio, perhaps empty; None: the checkpoint's, or else INSTRUCTION.
    Raises the errors of Qwen3Omni.stream.
    """
    content: list[dict[str, Any]] = [{"type": "audio", **window.item}]
    own = omni.transcription_instruction
    instruction = next((text for text in (instruction, own) if text is not None), INSTRUCTION)
    if instruction:
        content.append({"type": "text", "text": instruction})
    given: RequestArguments = {
        "thinker_do_sample": False,
        "thinker_max_new_tokens": max_new_tokens,
        **options,
    }
    return omni.stream_text([{"role": "user", "content": content}], **given)


def windows_for(omni: _Model, timed: bool) -> GrowingWindows:
    """Return windows for a model, whose context may be too small for LONGEST_S.

    timed: for a transcript with times.
    """
    half_s = omni.info.context_length / 2 / omni.media_settings.audio_tokens_per_s
    longest_s = max(LEAST_LONGEST_S, min(TIMED_S if timed else LONGEST_S, half_s))
    return GrowingWindows(longest_s, timed)


class _FileWork:
    """One file's windows and their transcripts.

    made: each request's start time and segment.
    """

    def __init__(self, file: Any, sound: GrowingWindows):
        self._file, self._opened_s = file, time.perf_counter()
        self._sound, self._warnings = sound, list[str]()
        self.error: Exception | None = None
        self.made: list[tuple[float, Segment]] = []

    def windows(self) -> Iterator[Window]:
        item = {"audio": self._file}
        try:
            for window in read_windows(item, self._sound, "audio", self._warnings.append):
                if self.error is not None:
                    return
                yield window
        except _FILE_ERRORS as error:
            self.error = error

    def outcome(self) -> Transcript | Failure:
        if self.error is not None:
            return Failure(self._file, self.error)
        joined, now_s = JoinedText(), time.perf_counter()
        segments = sorted((segment for _, segment in self.made), key=lambda made: made.start_s)
        for segment in segments:
            joined.add(segment.text)
            joined.end_window()
        first_s = min((at_s + made.timings.ttft_s for at_s, made in self.made), default=now_s)
        last_s = max((at_s + made.timings.total_s for at_s, made in self.made), default=now_s)
        audio_s = self._sound.length / SAMPLING_RATE
        return Transcript(
            file=self._file,
            text=joined.text,
            audio_s=audio_s,
            ttft_s=first_s - self._opened_s,
            total_s=last_s - self._opened_s,
            rtf=(last_s - self._opened_s) / audio_s,
            finish_reason=reason_of(segments),
            warnings=self._warnings,
        )


def reason_of(segments: Iterable[Segment]) -> FinishReason:
    """Return "length" if a limit ended a window's text, else "stop"."""
    return "length" if any(made.finish_reason == "length" for made in segments) else "stop"
