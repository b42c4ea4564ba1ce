"""Transcription of many audio files, several at a time, or of one file: streamed, or by windows."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import AudioError, LateError, PromptTooLongError
from qwen3_omni_neuron.events import Finished, FinishReason, TextDelta
from qwen3_omni_neuron.options import RequestArguments, RequestOptions
from qwen3_omni_neuron.prompt.media.audio import check_length, load_waveform
from qwen3_omni_neuron.runtime.stream import SpeechStream

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

INSTRUCTION = "Transcribe the speech in this audio. Answer with the words alone."
WINDOW_S = 8.0  # longest audio that the encoder attends over
CUT_S = 2.0  # end of a window, which is cut at its quietest point
SHORTEST_S = 1.0  # shortest window
_QUIET_S = 0.05  # length of the stretches whose loudness is compared
SAMPLING_RATE = 16000  # the audio encoder's; a file of another rate is resampled once, here
Given = TypeVar("Given")
Made = TypeVar("Made")
# Errors that concern one file. Any other error would be the same for every file and ends the run.
_FILE_ERRORS = (AudioError, PromptTooLongError, LateError)


@dataclass(frozen=True)
class Transcript:
    """Transcript of one file.

    audio_s: duration of the audio. ttft_s: time from opening the file to the first text token.
    total_s: time from opening the file to the last token. rtf: total_s / audio_s; below 1 is faster
    than real time. finish_reason: "stop" (the model ended the text), or "length" (max_new_tokens or
    the context did).
    """

    file: Path
    text: str
    audio_s: float
    ttft_s: float
    total_s: float
    rtf: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Segment:
    """Transcript of one window of an audio.

    start_s, end_s: times from the audio's beginning. token_ids: token ids of the text, without its
    end token.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Window:
    """Part of an audio that is transcribed on its own.

    start_s, end_s: times from the audio's beginning. audio: its samples, as an audio item of a
    message.
    """

    start_s: float
    end_s: float
    audio: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """Error message of a file that has no transcript."""

    file: Path
    error: str


def transcribe(
    omni: Qwen3Omni,
    files: Sequence[Path],
    instruction: str | None = None,
    concurrency: int = 1,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
) -> Generator[Transcript | Failure, None, None]:
    """Transcribe each file greedily, and yield the outcomes in the order of the files.

    instruction: text that follows the audio in the question, may be empty; None: the checkpoint's
    own, or else INSTRUCTION. concurrency: number of files at a time, at least 1; a model with fewer
    slots (max_concurrency) queues the others. max_new_tokens: limit of each text. A file that can't
    be read, is too long for the context, or takes too long gives a Failure.
    Raises OptionError, MessageError, ClosedError or EngineDiedError, which concern every file.
    Closing the iterator drops the files that were not begun.
    """
    yield from _several(
        partial(_transcribe_one, omni, instruction, max_new_tokens), files, concurrency
    )


def stream_transcript(
    omni: Qwen3Omni,
    audio: Mapping[str, Any],
    instruction: str | None = None,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
    **options: "Unpack[RequestArguments]",
) -> SpeechStream:
    """Transcribe one audio greedily, event by event: TextDelta, and Finished at the end.

    audio: an audio item of a message, such as {"audio": a path or bytes}. options: options of a
    request. The other arguments are those of `transcribe`. Raises the errors of Qwen3Omni.stream.
    """
    samples = load_waveform(audio, SAMPLING_RATE, "audio")
    return _stream_samples(omni, samples, instruction, max_new_tokens, options)


def transcribe_windows(
    omni: Qwen3Omni,
    audio: Mapping[str, Any],
    instruction: str | None = None,
    concurrency: int = 1,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
) -> Generator[Segment, None, None]:
    """Transcribe one audio window by window, each on its own, and yield them in order.

    So the time of words is known to a window, and audio may be longer than the context. A window is
    at most WINDOW_S long, and is cut where its last CUT_S are quietest. The arguments are those of
    `stream_transcript` and of `transcribe`; max_new_tokens limits each window's text.
    """

    def transcribe_window(window: Window) -> Segment:
        with stream_transcript(omni, window.audio, instruction, max_new_tokens) as stream:
            deltas = [event for event in stream if isinstance(event, TextDelta) and event.text]
        text = "".join(delta.text for delta in deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return Segment(window.start_s, window.end_s, text, token_ids)

    yield from _several(transcribe_window, read_windows(audio), concurrency)


def read_windows(
    audio: Mapping[str, Any], cut: bool = True, longest_s: float = math.inf
) -> list[Window]:
    """Read an audio and cut it into windows; if `cut` is false, into one window.

    Raises AudioError, and PromptTooLongError for an audio that lasts more than longest_s.
    """
    samples = load_waveform(audio, SAMPLING_RATE, "audio", longest_s)
    return [
        Window(
            start / SAMPLING_RATE,
            end / SAMPLING_RATE,
            {"audio": samples[start:end], "sampling_rate": SAMPLING_RATE},
        )
        for start, end in (windows(samples) if cut else [(0, len(samples))])
    ]


class GrowingWindows:
    """Windows of sound that arrives in pieces: those of the whole, each as soon as it is known.

    length: number of samples so far. held: number of those that no window has yet, at most those
    of 9 s after a call.
    """

    def __init__(self) -> None:
        self.length = self.held = 0
        self._pieces: list[NDArray[np.float32]] = []

    def push(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Take the next samples, at SAMPLING_RATE; return the windows that are known now."""
        self.length += len(samples)
        self.held += len(samples)
        self._pieces.append(samples)
        return self._cut(True) if self.held >= (WINDOW_S + SHORTEST_S) * SAMPLING_RATE else []

    def finish(self) -> list[NDArray[np.float32]]:
        """Return the windows that are left, two at most: the sound has ended."""
        return self._cut(False) if self.held else []

    def check(self, where: str) -> None:
        """Raise AudioError if the sound is too short to be transcribed. where: its name there."""
        check_length(self.length, SAMPLING_RATE, where)

    def _cut(self, grows: bool) -> list[NDArray[np.float32]]:
        samples = np.concatenate(self._pieces)
        bounds = windows(samples, grows)
        end = bounds[-1][1]
        self._pieces, self.held = [samples[end:]], len(samples) - end
        return [samples[first:last] for first, last in bounds]


def windows(samples: NDArray[np.float32], grows: bool = False) -> list[tuple[int, int]]:
    """Return each window's first sample and the one after its last. samples: at SAMPLING_RATE.

    grows: more samples follow; only windows that they can't change are returned.
    """
    most, last, least = (int(s * SAMPLING_RATE) for s in (WINDOW_S, CUT_S, SHORTEST_S))
    step = int(_QUIET_S * SAMPLING_RATE)
    bounds, start = list[tuple[int, int]](), 0
    enough = most + least if grows else most + 1
    while len(samples) - start >= enough:
        earliest, latest = start + most - last, min(start + most, len(samples) - least)
        steps = (latest - earliest) // step
        parts = samples[earliest : earliest + steps * step].reshape(steps, step)
        end = earliest + int(np.square(parts).sum(1).argmin()) * step + step // 2
        bounds.append((start, end))
        start = end
    return bounds if grows else [*bounds, (start, len(samples))]


def _several(
    call: Callable[[Given], Made], given: Sequence[Given], concurrency: int
) -> Generator[Made, None, None]:
    # One thread for each request takes its tokens as they are made, so that its times are true and
    # no reply waits for its reader; the model runs all requests as one batch.
    pool = ThreadPoolExecutor(concurrency, "transcribe")
    try:
        yield from pool.map(call, given)
    finally:
        # Does not wait: requests that still run end when the model is closed.
        pool.shutdown(wait=False, cancel_futures=True)


def _stream_samples(
    omni: Qwen3Omni,
    samples: NDArray[np.float32],
    instruction: str | None,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> SpeechStream:
    content: list[dict[str, Any]] = [
        {"type": "audio", "audio": samples, "sampling_rate": SAMPLING_RATE}
    ]
    if instruction is None:
        instruction = omni.transcription_instruction
    if instruction is None:
        instruction = INSTRUCTION
    if instruction:
        content.append({"type": "text", "text": instruction})
    given = {"thinker_do_sample": False, "thinker_max_new_tokens": max_new_tokens, **options}
    return omni.stream_text([{"role": "user", "content": content}], **given)


def _transcribe_one(
    omni: Qwen3Omni, instruction: str | None, max_new_tokens: int, file: Path
) -> Transcript | Failure:
    start_s = time.perf_counter()
    try:
        samples = load_waveform({"audio": file}, SAMPLING_RATE, "audio")
        read_s = time.perf_counter() - start_s
        with _stream_samples(omni, samples, instruction, max_new_tokens, {}) as stream:
            (result,) = (event.result for event in stream if isinstance(event, Finished))
    except _FILE_ERRORS as error:
        return Failure(file, str(error))
    audio_s = len(samples) / SAMPLING_RATE
    total_s = read_s + result.timings.total_s
    return Transcript(
        file=file,
        text=result.text,
        audio_s=audio_s,
        ttft_s=read_s + result.timings.ttft_s,
        total_s=total_s,
        rtf=total_s / audio_s,
        finish_reason=result.thinker_finish_reason,
    )
