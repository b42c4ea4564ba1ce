"""What the runtime asks of an engine, whatever it runs on.

An engine works on slots, the lines of its KV cache or of its streaming state; it knows nothing of
requests. It takes several slots in one call, chooses the compiled bucket and pads inside. Tensors
are on the host.

Each engine is called from one thread at a time. A call that raises has moved no slot: the runtime
may make it again with fewer slots, to find the one that is at fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.model.sampler import top_p_limits


@dataclass(frozen=True)
class PredictorSampling:
    """How codes 1 to 15 of a frame are drawn: uniforms float32 [15] in [0, 1), None for greedy."""

    uniforms: NDArray[np.float32] | None
    top_k: int
    top_p: float


class Thinker(Protocol):
    """Reads prompts, writes text."""

    slots: int
    context_length: int

    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Fill a slot from its beginning.

        Returns the last row's logits [1, vocab], and the accept layer's hidden states [media,
        hidden] at the prompt's audio, image and video positions, in order.
        """
        ...

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [len(slots), vocab]."""
        ...

    def close(self) -> None:
        """Give back what the engine holds. Calls that come later, or are under way, may raise."""
        ...


class Talker(Protocol):
    """Reads text tokens, writes codec frames.

    Of each slot it keeps the KV cache, the last hidden state and the last frame's feedback.
    """

    slots: int
    context_length: int

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int) -> None:
        """Do what can be done of a slot's prompt before the thinker has answered.

        Raises PromptTooLongError where its rows leave no position for a frame.
        """
        ...

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """Do the rest. accepted: as `Thinker.prefill` returns it; first_token: the first generated
        one. Returns logits [1, codec vocab] of code 0."""
        ...

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        """Write the frame that begins with code 0. Returns codes int64 [len(slots), 16]."""
        ...

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append the slot's last frame and the row of one text token to each slot. Returns logits
        [len(slots), codec vocab] of code 0."""
        ...

    def close(self) -> None:
        """As `Thinker.close`."""
        ...


class Vocoder(Protocol):
    """Reads frames, writes sound.

    chunk_frames: the compiled chunk sizes, ascending. All chunks of one call are of the same size;
    the last one of a stream may be shorter, after which its slot can only be started anew.
    """

    slots: int
    chunk_frames: tuple[int, ...]
    frame_samples: int
    latency_samples: int

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams. codes: int64 [frames, 16] a slot. Returns float32
        [frames * frame_samples - latency_samples] a slot, 24 kHz, in [-1, 1]."""
        ...

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams: float32 [frames * frame_samples] a slot."""
        ...

    def close(self) -> None:
        """As `Thinker.close`."""
        ...


class StageEngines(TypedDict, total=False):
    """The engines that were built in one process, by stage."""

    thinker: Thinker
    talker: Talker
    vocoder: Vocoder


@dataclass(frozen=True)
class Engines:
    """What a pipeline drives. talker and vocoder are None where the checkpoint can't speak.

    enter_thread: what a thread does first that is to call an engine.
    """

    thinker: Thinker
    talker: Talker | None
    vocoder: Vocoder | None
    enter_thread: Callable[[], None] = lambda: None

    @staticmethod
    def of(built: StageEngines, enter_thread: Callable[[], None] = lambda: None) -> "Engines":
        """Make one of engines by stage, of which the thinker is there."""
        return Engines(built["thinker"], built.get("talker"), built.get("vocoder"), enter_thread)


class Numbers:
    """Integers as tensors int64 [1], ready made: views on a count from 0 up to `limit`."""

    def __init__(self, limit: int):
        self._count = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        return self._count[number : number + 1]


class DecoderSlots(Protocol):
    """A decoder with a KV cache line a slot, on whatever it runs."""

    slots: int
    context_length: int

    def prefill(self, slot: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0. rows: [S, hidden]; positions: float32 [3, S]. Returns
        logits [1, vocab] and the post-norm hidden state [1, hidden] of the last row."""
        ...

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row [n, hidden] to each slot. Returns logits [n, vocab] and post-norm hidden
        states [n, hidden]."""
        ...


class Predictor(Protocol):
    """Writes the rest of frames, each sampled in its own way."""

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """hidden: [n, hidden], the talker's, post-norm; code0: int64 [n]. Returns codes int64
        [n, 16], code 0 first, and the feedback [n, hidden]: see model.code_predictor."""
        ...


def draws(sampling: Sequence[PredictorSampling]) -> tuple[Tensor, Tensor]:
    """Uniforms [n, 15] and top-p limits [n] of frames that are all sampled, as a graph takes
    them."""
    uniforms = [how.uniforms for how in sampling if how.uniforms is not None]
    return torch.from_numpy(np.stack(uniforms)), top_p_limits([how.top_p for how in sampling])
