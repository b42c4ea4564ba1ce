"""What a request gives back: events while it runs, and the result at its end."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24000

FinishReason = Literal["stop", "length", "no_speech"]


@dataclass(frozen=True)
class Timings:
    """Seconds since the request arrived, and what follows from them.

    queued_s: until there was a free slot; ttft_s: to the first text token; ttfb_s: to the first
    audio sample (None without speech); total_s: to the last event; audio_s: duration of the audio;
    rtf: arrival of the last sample over audio_s, below 1 is faster than real time (None without
    speech); prompt_tokens, text_tokens, frames: how many.
    """

    queued_s: float
    ttft_s: float
    ttfb_s: float | None
    total_s: float
    audio_s: float
    rtf: float | None
    prompt_tokens: int
    text_tokens: int
    frames: int


@dataclass(frozen=True)
class SpeechResult:
    """A whole reply.

    text: without special tokens. token_ids: generated thinker ids, EOS included when it was
    produced. codes: int64 [frames, code_groups]. audio: float32 [samples] in [-1, 1] at
    sample_rate Hz. Finish reasons: "stop" (the model ended), "length" (a limit did), and for the
    talker "no_speech" (nothing to say, or speech was not asked for). seed: what reproduces it.
    """

    text: str
    token_ids: list[int]
    codes: NDArray[np.int64]
    audio: NDArray[np.float32]
    sample_rate: int
    thinker_finish_reason: FinishReason
    talker_finish_reason: FinishReason
    timings: Timings
    seed: int


@dataclass(frozen=True)
class TextDelta:
    """More text, cut at whole characters, and the token ids that it came from."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class AudioChunk:
    """More audio: float32 [samples], the index of its first sample, the frames it was made of."""

    samples: NDArray[np.float32]
    first_sample: int
    frames: int


@dataclass(frozen=True)
class Finished:
    """The last event of a request."""

    result: SpeechResult


Event = TextDelta | AudioChunk | Finished
