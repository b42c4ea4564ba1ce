"""Requests: what the caller asks for (`Request`), and its state while it runs (`LiveRequest`)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.sampling import RequestRandom
from qwen3_omni_neuron.errors import LateError
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.prompt import Prompt, PromptKeys
from qwen3_omni_neuron.runtime.buffers import CAPACITY, MAX_TOKENS, Output, TextEnd, TokenBuffer
from qwen3_omni_neuron.runtime.grammar import Grammar
from qwen3_omni_neuron.runtime.playback import Playback
from qwen3_omni_neuron.runtime.runaway import SpokenPace
from qwen3_omni_neuron.runtime.stop_strings import TextCodec

# Most tokens of a WrittenReply: they are put at once, and the buffers have space for so many.
MOST_WRITTEN = min(CAPACITY, MAX_TOKENS)
RECENT_FRAMES = 9  # arrivals that frame_pace averages over


@dataclass(frozen=True)
class WrittenReply:
    """Reply, or piece of a reply, whose text is given with its request.

    token_ids: 1 to MOST_WRITTEN ids. before: white space between the previous piece and this one.
    """

    token_ids: tuple[int, ...]
    before: str = ""


@dataclass(frozen=True)
class Request:
    """One request: its prompt and its options.

    options: with a seed. arrived_s: time by the clock when it came, before its conversation was
    read. codec: decodes its reply. keys: of the prompt's rows in the prefix cache; None: it is not
    used. ahead: see `Pipeline.prefill_ahead`. written: reply to speak without a call of the
    thinker's engine. thinks: its text begins with reasoning. pace: how fast the caller's earlier
    replies were spoken.
    """

    prompt: Prompt
    options: RequestOptions
    speak: bool
    arrived_s: float
    codec: TextCodec
    keys: PromptKeys | None = None
    ahead: bool = False
    written: WrittenReply | None = None
    grammar: Grammar | None = None
    thinks: bool = False
    pace: SpokenPace = field(default_factory=SpokenPace)


@dataclass
class Timestamps:
    """Times of a request's events by the clock, in seconds. None: has not happened."""

    admitted_s: float | None = None
    first_token_s: float | None = None
    first_sample_s: float | None = None
    last_sample_s: float | None = None
    progress_s: float = 0.0  # the last token, frame or chunk


class LiveRequest:
    """State of one request from `Pipeline.submit` to its end.

    The pipeline's lock guards every field except `random`, and except `called_s`, `speech_s` and
    `prefilled_rows`, whose parts are written by one stage each. wake: lets every stage drop a
    request that ended.
    """

    def __init__(
        self,
        request: Request,
        text: TokenBuffer,
        output: Output,
        wake: Callable[[], None],
        now: Callable[[], float],
    ):
        """now: clock, in seconds."""
        self.request, self.text, self.output, self._wake = request, text, output, wake
        assert request.options.seed is not None
        self.seed = request.options.seed
        self.random = RequestRandom(self.seed)
        self.timestamps = Timestamps(progress_s=request.arrived_s)
        self.slot = -1  # its row in every engine; -1 while it is queued
        self.holders = 0  # stages that have a task for it; the slot is free at 0
        self.ended = False  # complete, cancelled or failed
        self.error: BaseException | None = None
        self.token_ids: list[int] = []
        # One for each of token_ids, where the request asks: its own, and those of the likeliest.
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.accepted: Tensor | None = None  # hidden states of the accept layer, for the talker
        self.cached_rows = 0  # prompt rows in the prefix cache; an estimate before prefill
        # By stage, rows of its prompt that were cached or computed so far.
        self.prefilled_rows = {"thinker": 0, "talker": 0}
        self.encoding = False  # whether its prefill waits for the encoder stage
        self.encoded: PromptMedia | None = None  # media that the encoder stage has encoded
        self.codes: list[NDArray[np.int64]] = []  # [16] a frame
        self.end_probabilities: list[float] = []  # by frame; 1 before the whole text was taken
        self.decoded_frames = 0  # frames of `codes` that the vocoder has decoded
        self.chunk_wanted = 1  # frames that the vocoder's next chunk needs
        self.chunks = 0  # number of chunks that the vocoder has decoded
        self.chunk_due = False  # the vocoder decodes the first chunk now, or next
        self.playback = Playback(now)  # what a player has of the chunks that were passed on
        # By stage, start of its engine call now; None between calls.
        self.called_s: dict[str, float | None] = dict.fromkeys(
            ("encoder", "thinker", "talker", "vocoder")
        )
        # By stage, time of its calls since the first token.
        self.speech_s: dict[str, float] = dict.fromkeys(("thinker", "talker", "vocoder"), 0.0)
        self.frame_times: deque[float] = deque(maxlen=RECENT_FRAMES)
        self.speech_ended = False  # no frame comes after those in `codes`
        self.thinker_finish: FinishReason = "length"
        self.talker_finish: FinishReason = "no_speech"

    def put_written(self, accepted: Tensor, now: float) -> None:
        """Put the whole text of a written reply, once it has a slot. accepted: [0, hidden]."""
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
        """End the request now. error: None where it is complete or was cancelled."""
        if not self.ended:
            self.ended, self.error = True, error
            self.text.close(error)
            self.output.notify()
            self._wake()

    def end_speech(self, why: FinishReason) -> None:
        """Record that no frame comes after those in `codes`. The lock is held."""
        self.talker_finish, self.speech_ended = why, True
        self.text.abandon()
        self._wake()

    @property
    def owner(self) -> str | None:
        """Who sent the request, such as a server's API key."""
        return self.request.options.owner

    @property
    def waiting_frames(self) -> int:
        """Frames that the vocoder has not decoded."""
        return len(self.codes) - self.decoded_frames

    @property
    def speech_over(self) -> bool:
        """True where all of its speech was decoded, or it has none."""
        return self.speech_ended and not self.waiting_frames

    def deadline_s(self, waiting_since_s: float) -> float:
        """Return the time by the clock at which a wait for this request becomes too long.

        waiting_since_s: when the wait began, such as of a caller that had stalled the stages. Time
        counts from the last token, frame or chunk after it, or from the start of an engine's call
        in progress.
        """
        if self.timestamps.first_token_s is None:
            return self.request.arrived_s + self.request.options.first_token_timeout_s
        calls = [start_s for start_s in self.called_s.values() if start_s is not None]
        since_s = max(self.timestamps.progress_s, waiting_since_s)
        return min([since_s, *calls]) + self.request.options.wait_timeout_s

    def late(self) -> LateError:
        """Return the error for a missed deadline: where the request is, and what to do."""
        if self.timestamps.admitted_s is None:
            where = "it was still queued: every slot was in use"
            hint = "Raise first_token_timeout_s, or load with a larger max_concurrency."
        elif self.timestamps.first_token_s is None:
            where = "the thinker was still at the prompt"
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
    """Return seconds a frame, from the times of the last arrivals; None before there are two."""
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
