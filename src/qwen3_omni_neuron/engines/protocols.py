"""Protocols of the engines that the runtime calls, and of their parts.

The runtime calls `Thinker`, `Talker` and `Vocoder`. engines.thinker and engines.talker make the
first two from parts of a target: `ThinkerSlots`, and `DecoderSlots` with `Predictor`.

An engine works on slots, the rows of its KV cache or of its streaming state, and knows nothing of
requests. The engine chooses the compiled bucket and pads to it. Tensors are on the host. Each
engine is called from one thread at a time, but an `Encoder` also while its thinker is in a call.

A call that raises leaves every slot unchanged; one that computes rows from `start` on leaves only
the first `start` rows. So the runtime may repeat a call with fewer slots.

`fault` of an engine that runs in other processes is a `Fault`, else None. The runtime calls it
several times a second.
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
"""Poll an engine's processes. Returns an error if it can't be called any more, else None.

Any thread may call it at any time. Returns None after `close`.
"""


class Encoder(Protocol):
    """Audio and vision encoder of a thinker, which can run while the thinker is in a call."""

    def encode(self, prompt: Prompt, start: int = 0) -> PromptMedia | None:
        """Encode the media of a prompt's tokens from `start` on. Returns None where there are none.

        Media without any of these tokens are not encoded.
        """


class Thinker(Protocol):
    """Engine that reads prompts and writes text tokens.

    chunked_prefill: whether a prefill may start after rows that a slot holds already, and rows can
    be copied. Where it is False, `start` is always 0 and `copy` is not called.
    """

    slots: int
    context_length: int
    chunked_prefill: bool
    fault: Fault | None

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows of a prompt from `start` on, after the first `start` rows of a slot.

        prompt: may be cut to its first tokens and still have all media. start: number of the
        prompt's rows that the slot holds already; later rows of the slot are dropped. media: result
        of the target's `Encoder` for these rows at least; None: they are encoded here.
        Returns the last row's logits [1, vocab], and the accept layer's hidden states [media,
        hidden] at the audio, image and video positions from `start` on, in order.
        """

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one, whose own rows are dropped."""

    def clear(self, slot: int) -> None:
        """Drop a slot's rows, and write zeros wherever its rows have been.

        A masked value counts, times 0, so a later request's rows beside NaN would become NaN.
        """

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [len(slots), vocab]."""

    def close(self) -> None:
        """Release the engine's resources. Calls in progress and later calls may raise."""


@dataclass(frozen=True)
class PredictorSampling:
    """Sampling of codes 1 to 15 of one frame.

    noise: start of the frame's noise (engines.noise.Noise.at); None: greedy.
    """

    noise: int | None
    top_k: int
    top_p: float


class Talker(Protocol):
    """Engine that reads text tokens and writes codec frames, the code predictor included.

    It keeps for each slot the KV cache, the last hidden state and the last frame's feedback row.
    chunked_prefill: see Thinker; if it is False, `prefill_chunk` is not called either.
    """

    slots: int
    context_length: int
    chunked_prefill: bool
    fault: Fault | None

    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        """Compute the user rows of a prompt from `start` on, without the assistant's.

        start, accepted: see `prepare` and `prefill`. Raises PromptTooLongError, as `prepare`, and
        EngineError if the last row is not finite.
        """

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see Thinker.copy."""

    def clear(self, slot: int) -> None:
        """Drop a slot's rows; see Thinker.clear."""

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        """Compute the part of a slot's prompt that is known before the thinker answers.

        start: number of the prompt's user rows that the slot holds already; later rows of the slot
        are dropped. Raises PromptTooLongError if the prompt leaves no position for a frame.
        """

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """Complete the prompt that `prepare` has begun.

        accepted: the thinker's hidden states [media, hidden] at the media positions of the prompt's
        rows from `start` on. first_token: the first token that the thinker generated. Returns
        logits [1, codec vocab] of code 0.
        """

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        """Complete the frame that begins with code 0. Returns codes int64 [len(slots), 16].

        A code whose logits have NaN or +inf is NOT_FINITE of engines.sampling.
        """

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append the slot's last frame and the row of one text token to each slot.

        Returns logits [len(slots), codec vocab] of code 0.
        """

    def close(self) -> None:
        """Release what the engine holds; see Thinker.close."""


class Vocoder(Protocol):
    """Engine that reads codec frames and writes audio.

    chunk_frames: the compiled chunk sizes, ascending. All chunks of one call are of the same size;
    the last one of a stream may be shorter, and is padded. frames_at_once: most frames, of all
    streams together, that the runtime gives to one call.
    """

    slots: int
    chunk_frames: tuple[int, ...]
    frames_at_once: int
    frame_samples: int
    latency_samples: int
    fault: Fault | None

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams.

        codes: int64 [frames, 16] a slot. Returns float32 [frames * frame_samples -
        latency_samples] a slot, 24 kHz, in [-1, 1].
        """

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams. Returns float32 [frames * frame_samples] a slot."""

    def close(self) -> None:
        """Release what the engine holds; see Thinker.close."""


class StageEngines(TypedDict, total=False):
    """The engines that were built in one process, by stage."""

    encoder: Encoder
    thinker: Thinker
    talker: Talker
    vocoder: Vocoder


@dataclass(frozen=True)
class Engines:
    """The engines of one pipeline. talker and vocoder are None if the checkpoint can't speak.

    enter_thread: called once in each thread that will call an engine. shares_cores: whether the
    engines' calls share cores. encoder: None if media are encoded in the thinker's calls.
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
        """Make it from engines by stage, which must include the thinker."""
        talker, vocoder = built.get("talker"), built.get("vocoder")
        encoder = built.get("encoder")
        return Engines(built["thinker"], talker, vocoder, enter_thread, shares_cores, encoder)

    def close(self) -> None:
        """Close each engine."""
        for engine in (self.thinker, self.talker, self.vocoder):
            if engine is not None:
                engine.close()


class KvSlots(Protocol):
    """Decoder of a target, with one row of its KV cache for each slot.

    chunked_prefill: see Thinker.
    """

    slots: int
    context_length: int
    chunked_prefill: bool

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see Thinker.copy."""

    def clear(self, slot: int) -> None:
        """Drop a slot's rows; see Thinker.clear."""


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
        """Append tokens to the first `start` rows of a slot. Later rows of the slot are dropped.

        token_ids: [S]. positions: [3, S]. media: of these tokens. accepted: [S], true for tokens
        whose hidden state of the accept layer is wanted. Returns logits [1, vocab] of the last row,
        and these hidden states [accepted, hidden].
        """

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""


class DecoderSlots(KvSlots, Protocol):
    """The talker's decoder."""

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append rows to the first `start` rows of a slot. Later rows of the slot are dropped.

        rows: [S, hidden]. positions: float32 [3, S]. Returns logits [1, vocab] and the post-norm
        hidden state [1, hidden] of the last row.
        """

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row of [n, hidden] to each of n slots.

        Returns logits [n, vocab] and post-norm hidden states [n, hidden].
        """


class Predictor(Protocol):
    """Code predictor of a target, which completes frames."""

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        """Complete a frame of each of n slots, each with its own sampling.

        hidden: the talker's post-norm hidden states, [all slots, hidden]. feedback: [all slots,
        hidden], receives the feedback rows of these slots: see model.code_predictor. Returns codes
        int64 [n, 16], code 0 first; see Talker.predict.
        """
