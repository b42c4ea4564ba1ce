"""What a request asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from qwen3_omni_neuron.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.sampling import SamplingParams


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
