"""Protocols of the engines that the runtime calls, and their parts.

engines.thinker and engines.talker build `Thinker` and `Talker` from parts of a target:
`ThinkerSlots`, and `DecoderSlots` with `Predictor`.

An engine works on slots, the rows of its KV cache or streaming state, and knows no requests. It
chooses the compiled bucket and pads to it. Tensors are on the host. One thread at a time calls each
engine, but an `Encoder` also during its thinker's calls.

A call that raises leaves slots unchanged, or, if it computes rows from `start` on, their first
`start` rows: the runtime may repeat a call with fewer slots.

The runtime calls `fault` several times a second; None: the engine runs in this process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.errors import Qwen3OmniError
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt

Fault = Callable[[], Qwen3OmniError | None]
"""Poll an engine's processes: return an error if it can no longer be called, else None.

Thread-safe. Returns None after `close`.
"""


class Encoder(Protocol):
    """Audio and vision encoder of a thinker, which may run during the thinker's calls."""

    def encode(self, prompt: Prompt, start: int = 0) -> PromptMedia | None:
        """Encode media with tokens from `start` on; None without media."""


class Thinker(Protocol):
    """Engine that reads prompts and writes text tokens.

    chunked_prefill: a prefill may follow rows of its slot, and rows can be copied. If False,
    `start` is 0 and `copy` is not called.
    """

    slots: int
    context_length: int
    chunked_prefill: bool
    fault: Fault | None

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on, after the first `start` rows of a slot.

        prompt: may be cut to its first tokens and still have all media. Drops the slot's later
        rows. media: result of `Encoder` for at least these rows; None: encode them here. Returns
        the last row's logits [1, vocab], and the accept layer's hidden states [media, hidden] at
        the media positions from `start` on, in order.
        """

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a slot to another one, replacing its rows."""

    def clear(self, slot: int) -> None:
        """Drop a slot's rows, and write zeros: NaN times a mask's 0 stays NaN."""

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [len(slots), vocab]."""

    def close(self) -> None:
        """Release the engine's resources. Current and later calls may raise."""


@dataclass(frozen=True)
class PredictorSampling:
    """Sampling of a frame's codes 1 to 15. noise: see engines.noise.Noise.at; None: greedy.

    token_id: the slot's in the next `step`, which an engine may then compute in the same call.
    """

    noise: int | None
    top_k: int
    top_p: float
    token_id: int | None = None


class Talker(Protocol):
    """Engine that reads text tokens and writes codec frames, with the code predictor.

    A slot has a KV cache, the last hidden state and the last frame's feedback row.
    chunked_prefill: see Thinker; if False, `prefill_chunk` is not called either.
    """

    slots: int
    context_length: int
    chunked_prefill: bool
    fault: Fault | None

    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        """Compute a prompt's user rows from `start` on.

        accepted: see `prefill`. Raises PromptTooLongError, as `prepare`, and EngineError if the
        last row is not finite.
        """

    def copy(self, source: int, target: int, rows: int) -> None:
        """See Thinker.copy."""

    def clear(self, slot: int) -> None:
        """See Thinker.clear."""

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        """Compute the part of a slot's prompt that is known before the thinker answers.

        start: user rows that the slot already has; later ones are dropped. Raises
        PromptTooLongError if no position remains for a frame.
        """

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """Complete the prompt of `prepare`. Returns logits [1, codec vocab] of code 0.

        accepted: the thinker's hidden states [media, hidden] at the prompt's media positions from
        `start` on. first_token: the thinker's first token.
        """

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        """Complete the frames that begin with code 0. Returns codes int64 [len(slots), 16].

        A code whose logits have NaN or +inf is NOT_FINITE of engines.sampling.
        """

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append each slot's last frame and the row of a text token.

        Returns logits [len(slots), codec vocab] of code 0.
        """

    def close(self) -> None:
        """See Thinker.close."""


class Vocoder(Protocol):
    """Engine that reads codec frames and writes audio.

    chunk_frames: compiled chunk sizes, ascending. A call's chunks have one size; a stream's last
    one may be shorter, and is padded. frames_at_once: upper bound of a call's frames.
    """

    slots: int
    chunk_frames: tuple[int, ...]
    frames_at_once: int
    frame_samples: int
    latency_samples: int
    fault: Fault | None

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams, int64 [frames, 16] each.

        Returns float32 [frames * frame_samples - latency_samples] per slot, 24 kHz, in [-1, 1].
        """

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams. Returns float32 [frames * frame_samples] per slot."""

    def close(self) -> None:
        """See Thinker.close."""


class StageEngines(TypedDict, total=False):
    """Engines built in one process, by stage."""

    encoder: Encoder
    thinker: Thinker
    talker: Talker
    vocoder: Vocoder


@dataclass(frozen=True)
class Engines:
    """Engines of a pipeline. talker and vocoder are None if the checkpoint can't speak.

    enter_thread: called once in each thread that will call an engine. shares_cores: the engines
    share cores. encoder: None if the thinker's calls encode media.
    """

    thinker: Thinker
    talker: Talker | None
    vocoder: Vocoder | None
    enter_thread: Callable[[], None] = lambda: None
    shares_cores: bool = False
    encoder: Encoder | None = None

    @staticmethod
    def of(
        built: StageEngines,
        enter_thread: Callable[[], None] = lambda: None,
        shares_cores: bool = False,
    ) -> "Engines":
        """Return the engines of `built`, at least the thinker."""
        talker, vocoder = built.get("talker"), built.get("vocoder")
        encoder = built.get("encoder")
        return Engines(built["thinker"], talker, vocoder, enter_thread, shares_cores, encoder)

    def close(self) -> None:
        """Close each engine."""
        for engine in (self.thinker, self.talker, self.vocoder):
            if engine is not None:
                engine.close()


class KvSlots(Protocol):
    """Decoder of a target, with a KV cache row per slot. chunked_prefill: see Thinker."""

    slots: int
    context_length: int
    chunked_prefill: bool

    def copy(self, source: int, target: int, rows: int) -> None:
        """See Thinker.copy."""

    def clear(self, slot: int) -> None:
        """See Thinker.clear."""


class ThinkerSlots(KvSlots, Protocol):
    """The thinker's decoder."""

    def prefill_tokens(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        media: PromptMedia | None,
        accepted: NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to the first `start` rows of a slot; later ones are dropped.

        token_ids: [S]. positions: [3, S]. media: media of these tokens. accepted: [S], true where
        the accept layer's hidden state is wanted. Returns the last row's logits [1, vocab], and
        these states [accepted, hidden].
        """

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""


class DecoderSlots(KvSlots, Protocol):
    """The talker's decoder."""

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append rows [S, hidden] to the first `start` rows of a slot; later ones are dropped.

        positions: float32 [3, S]. Returns the last row's logits [1, vocab] and post-norm hidden
        state [1, hidden].
        """

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows [n, hidden] to n slots: return logits [n, vocab] and post-norm states."""


class Predictor(Protocol):
    """Code predictor of a target."""

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        """Complete a frame of each of n slots. Returns codes int64 [n, 16]; see Talker.predict.

        hidden: the talker's post-norm hidden states, [all slots, hidden]. feedback: [all slots,
        hidden], receives these slots' feedback rows: see model.code_predictor.
        """
