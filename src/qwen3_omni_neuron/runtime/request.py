"""Requests (`Request`), and their state while they run (`LiveRequest`)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.errors import LateError
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import Prompt, PromptKeys
from qwen3_omni_neuron.runtime.buffers import CAPACITY, MAX_TOKENS, Output, TextEnd, TokenBuffer
from qwen3_omni_neuron.runtime.grammar import ForcedTokens, Grammar
from qwen3_omni_neuron.runtime.runaway import SpokenPace
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.runtime.stop_strings import TextCodec

# Tokens that a reply's buffers accept at once.
MOST_WRITTEN = min(CAPACITY, MAX_TOKENS)
RECENT_FRAMES = 9  # for frame_pace


@dataclass(frozen=True)
class WrittenReply:
    """Reply, or a piece of one, whose text the caller wrote.

    token_ids: 1 to MOST_WRITTEN ids. before: white space after the previous piece.
    """

    token_ids: tuple[int, ...]
    before: str = ""


@dataclass(frozen=True)
class Request:
    """One request.

    options: with a seed. arrived_s: by the clock. keys: of the prompt's rows in the prefix cache.
    ahead: see `Pipeline.prefill_ahead`. written: reply to speak without the thinker. thinks: the
    text begins with reasoning. pace: of the caller's earlier replies.
    """

    prompt: Prompt
    options: RequestOptions
    speak: bool
    arrived_s: float
    codec: TextCodec
    keys: PromptKeys | None = None
    ahead: bool = False
    written: WrittenReply | None = None
    grammar: Grammar | ForcedTokens | None = None
    thinks: bool = False
    pace: SpokenPace = field(default_factory=SpokenPace)


@dataclass
class Timestamps:
    """Times by the clock in seconds; None: not yet."""

    admitted_s: float | None = None
    first_token_s: float | None = None
    first_sample_s: float | None = None
    last_sample_s: float | None = None
    progress_s: float = 0.0  # the last token, frame or chunk


class LiveRequest:
    """State of one request from `Pipeline.submit` to its end.

    The pipeline's lock guards every field but `called_s`, `speech_s` and `prefilled_rows`, each of
    whose entries one stage writes.
    """

    def __init__(
        self,
        request: Request,
        text: TokenBuffer,
        output: Output,
        wake: Callable[[], None],
        now: Callable[[], float],
    ):
        self.request, self.text, self.output, self._wake = request, text, output, wake
        assert request.options.seed is not None
        self.seed = request.options.seed
        self.timestamps = Timestamps(progress_s=request.arrived_s)
        self.slot = -1  # row in every engine; -1 while queued
        self.holders = 0  # stages that have a task for it
        self.ended = False
        self.error: BaseException | None = None
        self.token_ids: list[int] = []
        # By token, if requested.
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.accepted: Tensor | None = None
        self.cached_rows = 0  # an estimate before prefill
        # By stage, rows cached or computed.
        self.prefilled_rows = {"thinker": 0, "talker": 0}
        self.encoding = False  # prefill waits for the encoder stage
        self.encoded: PromptMedia | None = None
        self.codes: list[NDArray[np.int64]] = []  # [16] a frame
        self.end_probabilities: list[float] = []  # by frame; 1 until the whole text was consumed
        self.decoded_frames = 0
        self.chunk_wanted = 1  # frames of the vocoder's next chunk
        self.chunks = 0  # decoded by the vocoder
        self.chunk_due = False  # the first chunk is decoded now or next
        self.playback = Playback(now)
        # By stage; None between calls.
        self.called_s: dict[str, float | None] = dict.fromkeys(
            ("encoder", "thinker", "talker", "vocoder")
        )
        # By stage, since the first token.
        self.speech_s: dict[str, float] = dict.fromkeys(("thinker", "talker", "vocoder"), 0.0)
        self.frame_times: deque[float] = deque(maxlen=RECENT_FRAMES)
        self.speech_ended = False
        self.thinker_finish: FinishReason = "length"
        self.talker_finish: FinishReason = "no_speech"

    def put_written(self, accepted: Tensor, now: float) -> None:
        """Write a written reply's text into the buffers. accepted: [0, hidden]."""
        assert self.request.written is not None
        self.accepted = accepted
        self.timestamps.first_token_s = self.timestamps.progress_s = now
        self.thinker_finish = "stop"
        for token_id in self.request.written.token_ids:
            self.token_ids.append(token_id)
            self.output.put(token_id)
            self.text.put(token_id)
        self.output.put(TextEnd())
        self.text.close()

    def end(self, error: BaseException | None = None) -> None:
        """End the request. error: None if complete or cancelled."""
        if not self.ended:
            self.ended, self.error = True, error
            self.text.close(error)
            self.output.notify()
            self._wake()

    def end_speech(self, why: FinishReason) -> None:
        """Record that no frame follows. The lock is held."""
        self.talker_finish, self.speech_ended = why, True
        self.text.abandon()
        self._wake()

    @property
    def owner(self) -> str | None:
        """Sender of the request."""
        return self.request.options.owner

    @property
    def waiting_frames(self) -> int:
        """Frames to decode."""
        return len(self.codes) - self.decoded_frames

    @property
    def speech_over(self) -> bool:
        """True if no frame remains to decode."""
        return self.speech_ended and not self.waiting_frames

    def deadline_s(self, waiting_since_s: float) -> float:
        """Return the time at which a wait becomes too long.

        It counts from the last token, frame or chunk after waiting_since_s, or the start of the
        current engine call.
        """
        if self.timestamps.first_token_s is None:
            return self.request.arrived_s + self.request.options.first_token_timeout_s
        calls = [start_s for start_s in self.called_s.values() if start_s is not None]
        since_s = max(self.timestamps.progress_s, waiting_since_s)
        return min([since_s, *calls]) + self.request.options.wait_timeout_s

    def late(self) -> LateError:
        """Return the error for a missed deadline."""
        if self.timestamps.admitted_s is None:
            where = "it was still queued: every slot was in use"
            hint = "Raise first_token_timeout_s, or load with a larger max_concurrency."
        elif self.timestamps.first_token_s is None:
            where = "the thinker was still reading the prompt"
            hint = "Raise first_token_timeout_s, or shorten the conversation."
        else:
            calls = [f"the {name}" for name, start in self.called_s.items() if start is not None]
            stuck = " and ".join(calls) or "no engine"
            where = f"at {len(self.token_ids)} tokens and {len(self.codes)} frames, in {stuck}"
            hint = "Raise wait_timeout_s, or find what stalls it: bench/ttfb_rtf.py --timeline."
        if self.timestamps.first_token_s is None:
            waited = f"no first token after {self.request.options.first_token_timeout_s} s"
        else:
            waited = f"nothing new for {self.request.options.wait_timeout_s} s"
        return LateError(f"{waited}; {where}. {hint}")


def frame_pace(times: deque[float]) -> float | None:
    """Return the mean seconds between frames; None for fewer than two."""
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
