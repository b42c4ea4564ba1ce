"""What the runtime asks of an engine, whatever it runs on.

An engine works on slots, the lines of its KV cache; it knows nothing of requests. Tensors are on
the host.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.prompt import Prompt


@dataclass(frozen=True)
class TalkerOutput:
    """logits [1, codec vocab] of code 0, and the post-norm hidden state [1, talker hidden] that
    the code predictor starts from."""

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class PredictorSampling:
    """How codes 1 to 15 are drawn: uniforms float32 [15] in [0, 1), None for greedy."""

    uniforms: NDArray[np.float32] | None
    top_k: int
    top_p: float


class Thinker(Protocol):
    """Reads prompts, writes text."""

    slots: int
    context_length: int

    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Fill a slot. Returns the last row's logits [1, vocab] and the accept layer's hidden
        states [S, hidden]."""
        ...

    def step(self, slot: int, token_id: int) -> Tensor:
        """Append one token. Returns logits [1, vocab]."""
        ...


class Talker(Protocol):
    """Reads text rows, writes codec frames. `text_row` is kept out of the path of a frame."""

    context_length: int

    def text_row(self, token_id: int) -> Tensor:
        """text_projection(embedding) [1, hidden]; computed at most once a token id."""
        ...

    def prompt_rows(self, prompt: Prompt, accepted: Tensor, speaker_id: int) -> Tensor:
        """All rows of the talker's prompt [rows, hidden] but the last, which needs the first
        generated token. accepted: the thinker's accept-layer hidden states [S, hidden]."""
        ...

    def prefill(self, slot: int, rows: Tensor, first_token: int) -> TalkerOutput:
        """Fill a slot with the prompt's rows and the row of the first generated token."""
        ...

    def step(self, slot: int, row: Tensor) -> TalkerOutput:
        """Append one frame's row [1, hidden]: feedback plus text row."""
        ...

    def predict(
        self, hidden: Tensor, code0: int, sampling: PredictorSampling
    ) -> tuple[Tensor, Tensor]:
        """The frame of a step. Returns codes int64 [1, 16] and the feedback [1, hidden]."""
        ...


class Vocoder(Protocol):
    """Reads frames, writes sound."""

    def decode(self, codes: Tensor) -> NDArray[np.float32]:
        """One full decode. codes: int64 [frames, 16]. Returns float32 [samples], 24 kHz."""
        ...


@dataclass(frozen=True)
class Engines:
    """What a pipeline drives. talker and vocoder are None where the checkpoint can't speak."""

    thinker: Thinker
    talker: Talker | None
    vocoder: Vocoder | None
