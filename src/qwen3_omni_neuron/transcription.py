"""Transcription of many audio files, several at a time."""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.conversation.media.audio import load_waveform
from qwen3_omni_neuron.errors import AudioError, LateError, PromptTooLongError
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.options import RequestOptions

INSTRUCTION = "Transcribe the speech in this audio. Answer with the words alone."
SAMPLING_RATE = 16000  # the audio encoder's; a file of another rate is resampled once, here
# Errors that concern one file. Any other error would be the same for every file and ends them all.
_FILE_ERRORS = (AudioError, PromptTooLongError, LateError)


@dataclass(frozen=True)
class Transcript:
    """Transcript of one file.

    audio_s: duration of the audio. ttft_s: from opening the file to the first token of text.
    total_s: from opening the file to the last token. rtf: total_s over audio_s; below 1 is faster
    than real time. finish_reason: "stop" (the model ended the text), or "length" (max_new_tokens
    or the context did).
    """

    file: Path
    text: str
    audio_s: float
    ttft_s: float
    total_s: float
    rtf: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Failure:
    """Error message of a file that has no transcript."""

    file: Path
    error: str


def transcribe(
    omni: Qwen3Omni,
    files: Sequence[Path],
    instruction: str = INSTRUCTION,
    concurrency: int = 1,
    max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
) -> Generator[Transcript | Failure, None, None]:
    """Transcribe each file greedily, and yield the outcomes in the order of the files.

    instruction: text that follows the audio in the question. concurrency: files at a time, 1 or
    more; a model of fewer slots (max_concurrency) queues the others. max_new_tokens: limit of each
    text. A file that can't be read, is too long for the context, or takes too long gives a Failure.
    Raises OptionError, MessageError, ClosedError or EngineDiedError, which concern every file.
    Closing the iterator gives up the files that were not begun.
    """
    transcribe_one = partial(_transcribe_one, omni, instruction, max_new_tokens)
    # A thread a file: each takes its own request's tokens as they are made, so that its times are
    # true and no reply waits for its reader; the model runs them all as one batch.
    pool = ThreadPoolExecutor(concurrency, "transcribe")
    try:
        yield from pool.map(transcribe_one, files)
    finally:
        # No wait: requests that still run end when the model is closed.
        pool.shutdown(wait=False, cancel_futures=True)


def _transcribe_one(
    omni: Qwen3Omni, instruction: str, max_new_tokens: int, file: Path
) -> Transcript | Failure:
    start_s = time.perf_counter()
    try:
        samples = load_waveform({"audio": file}, SAMPLING_RATE, "audio")
        read_s = time.perf_counter() - start_s
        content = [
            {"type": "audio", "audio": samples, "sampling_rate": SAMPLING_RATE},
            {"type": "text", "text": instruction},
        ]
        result = omni.generate_text(
            [{"role": "user", "content": content}],
            thinker_do_sample=False,
            thinker_max_new_tokens=max_new_tokens,
        )
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
