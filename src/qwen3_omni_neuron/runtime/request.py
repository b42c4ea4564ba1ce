"""What a request asks for."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.errors import LateError
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.runtime.output import Output
from qwen3_omni_neuron.runtime.sampling import RequestRandom, SamplingParams
from qwen3_omni_neuron.runtime.token_buffer import TokenBuffer


@dataclass(frozen=True)
class ThinkerRequest:
    """What the thinker is to do."""

    prompt: Prompt
    sampling: SamplingParams
    max_new_tokens: int
    eos_ids: frozenset[int]
    decode_text: Callable[[list[int]], str]


@dataclass(frozen=True)
class TalkerRequest:
    """What the talker is to do, and the vocoder.

    prompt: what the talker reads of the thinker's. chunk_frames: sizes of the first chunks, the
    last of them for all that follow; None lets the pace of the frames decide (see
    schedule.AdaptiveSchedule).
    """

    prompt: TalkerPrompt
    speaker_id: int
    sampling: SamplingParams
    predictor_sampling: SamplingParams
    max_new_tokens: int
    chunk_frames: tuple[int, ...] | None


@dataclass(frozen=True)
class Request:
    """A request.

    talker None: text alone is asked for. arrived_s: the clock's time when it came, before the
    conversation was read. first_token_timeout_s: from then to the first token. wait_timeout_s:
    between any two of its tokens, frames or chunks.
    """

    thinker: ThinkerRequest
    talker: TalkerRequest | None
    seed: int
    arrived_s: float
    first_token_timeout_s: float
    wait_timeout_s: float


RECENT_FRAMES = 9  # arrivals that the pace of the frames is taken from


@dataclass
class Marks:
    """When things happened, by the clock, in seconds. None: not yet."""

    admitted_s: float | None = None
    first_token_s: float | None = None
    first_sample_s: float | None = None
    last_sample_s: float | None = None
    progress_s: float = 0.0  # the last token, frame or chunk


class LiveRequest:
    """Guarded by the pipeline's lock, but for what one stage alone writes (`random`, `called_s`).

    slot: the line of every engine that it has, -1 while it is queued. holders: stages that still
    have it; with the last one it gives the slot back. ended: complete, cancelled or failed; every
    stage drops it then, woken by `wake`.
    """

    def __init__(
        self, request: Request, text: TokenBuffer, output: Output, wake: Callable[[], None]
    ):
        self.request, self.text, self.output, self._wake = request, text, output, wake
        self.random = RequestRandom(request.seed)
        self.marks = Marks(progress_s=request.arrived_s)
        self.slot = -1
        self.holders = 0
        self.ended = False
        self.error: BaseException | None = None
        self.token_ids: list[int] = []
        self.accepted: Tensor | None = None  # the accept layer's hidden states, for the talker
        self.codes: list[Tensor] = []  # one int64 [16] a frame
        self.decoded_frames = 0  # of `codes`, by the vocoder
        # When the engine call began that each stage is in for it; None between calls.
        self.called_s: dict[str, float | None] = dict.fromkeys(("thinker", "talker", "vocoder"))
        self.frame_times: deque[float] = deque(maxlen=RECENT_FRAMES)
        self.speech_ended = False  # no frame comes after those in `codes`
        self.thinker_finish: FinishReason = "length"
        self.talker_finish: FinishReason = "no_speech"

    def end(self, error: BaseException | None = None) -> None:
        """End it, now: with an error, or (None) because it is complete or nobody wants it."""
        if not self.ended:
            self.ended, self.error = True, error
            self.text.close(error)
            self.output.changed.notify_all()
            self._wake()

    @property
    def waiting_frames(self) -> int:
        """Frames that the vocoder has not decoded."""
        return len(self.codes) - self.decoded_frames

    def deadline_s(self, waiting_since_s: float) -> float:
        """When a wait for it has lasted too long that began at some time, by the clock.

        A call is late by its own length. Progress is not: a caller that was away for long, and has
        held it up by that, begins to wait anew.
        """
        if self.marks.first_token_s is None:
            return self.request.arrived_s + self.request.first_token_timeout_s
        calls = [start_s for start_s in self.called_s.values() if start_s is not None]
        since_s = max(self.marks.progress_s, waiting_since_s)
        return min([since_s, *calls]) + self.request.wait_timeout_s

    def late(self) -> LateError:
        """What to say when the deadline has passed."""
        if self.marks.admitted_s is None:
            where = "it was still queued: every slot was in use"
            hint = "Raise first_token_timeout_s, or load with a larger max_concurrency."
        elif self.marks.first_token_s is None:
            where = "the thinker was still at the prompt"
            hint = "Raise first_token_timeout_s, or shorten the conversation."
        else:
            calls = [f"the {name}" for name, start in self.called_s.items() if start is not None]
            stuck = " and ".join(calls) or "no engine"
            where = f"at {len(self.token_ids)} tokens and {len(self.codes)} frames, in {stuck}"
            hint = "Raise wait_timeout_s, or look at what stalls the engine."
        if self.marks.first_token_s is None:
            waited = f"no first token after {self.request.first_token_timeout_s} s"
        else:
            waited = f"nothing new for {self.request.wait_timeout_s} s"
        return LateError(f"{waited}; {where}. {hint}")


def frame_pace(times: deque[float]) -> float | None:
    """Seconds a frame, from the last arrivals; None before there are two."""
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
