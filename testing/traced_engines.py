"""Engines that note when each of their calls began and ended, and for which slots.

They stand between the pipeline and the engines, in whatever process or on whatever device those
run; where nobody asks for a timeline they are not there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling, Talker, Thinker, Vocoder

Result = TypeVar("Result")
PROMPT_STAGES = ("thinker prefill", "talker prepare")  # each once a request


@dataclass(frozen=True)
class Span:
    """One call, by the recorder's clock in seconds. slots: those that shared it."""

    stage: str
    start_s: float
    end_s: float
    slots: tuple[int, ...]


class Recorder:
    """Keeps the calls of all engines that it wraps. Each stage's thread appends its own, and a
    list's append is whole."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        """now: the clock of the pipeline, for spans to lie beside its events."""
        self._now = now
        self._spans: list[Span] = []

    def wrap(self, engines: Engines) -> Engines:
        """The same engines, watched: for `Qwen3Omni.load(wrap_engines=...)`."""
        talker, vocoder = engines.talker, engines.vocoder
        return replace(
            engines,
            thinker=TracedThinker(engines.thinker, self),
            talker=None if talker is None else TracedTalker(talker, self),
            vocoder=None if vocoder is None else TracedVocoder(vocoder, self),
        )

    def timed(
        self, stage: str, slots: Sequence[int], call: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Make a call and note it. One that raises is noted as well: it took its time."""
        start_s = self._now()
        try:
            return call(*arguments)
        finally:
            self._spans.append(Span(stage, start_s, self._now(), tuple(slots)))

    def of_request(self, slot: int, admitted_s: float) -> list[Span]:
        """The calls for the request that got a slot at some time, in the order that they began.

        The next request may begin in the slot before the caller of this one has seen its end, so
        what ends the list is a second prompt.
        """
        spans = [s for s in self._spans if slot in s.slots and s.start_s >= admitted_s]
        spans.sort(key=lambda span: span.start_s)
        seen: set[str] = set()
        for index, span in enumerate(spans):
            if span.stage in PROMPT_STAGES and span.stage in seen:
                return spans[:index]
            seen.add(span.stage)
        return spans


class TracedThinker:
    """Serves runtime.protocols.Thinker over another one."""

    def __init__(self, engine: Thinker, recorder: Recorder):
        self._engine, self._timed = engine, recorder.timed
        self.slots, self.context_length = engine.slots, engine.context_length

    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        return self._timed("thinker prefill", (slot,), self._engine.prefill, slot, prompt)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self._timed("thinker decode", slots, self._engine.step, slots, token_ids)

    def close(self) -> None:
        self._engine.close()


class TracedTalker:
    """Serves runtime.protocols.Talker over another one."""

    def __init__(self, engine: Talker, recorder: Recorder):
        self._engine, self._timed = engine, recorder.timed
        self.slots, self.context_length = engine.slots, engine.context_length

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int) -> None:
        self._timed("talker prepare", (slot,), self._engine.prepare, slot, prompt, speaker_id)

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        return self._timed(
            "talker prefill", (slot,), self._engine.prefill, slot, accepted, first_token
        )

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        return self._timed("code predictor", slots, self._engine.predict, slots, code0, sampling)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self._timed("talker step", slots, self._engine.step, slots, token_ids)

    def close(self) -> None:
        self._engine.close()


class TracedVocoder:
    """Serves runtime.protocols.Vocoder over another one."""

    def __init__(self, engine: Vocoder, recorder: Recorder):
        self._engine, self._timed = engine, recorder.timed
        self.slots, self.chunk_frames = engine.slots, engine.chunk_frames
        self.frame_samples, self.latency_samples = engine.frame_samples, engine.latency_samples

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        return self._timed("code2wav", slots, self._engine.start, slots, codes)

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        return self._timed("code2wav", slots, self._engine.step, slots, codes)

    def close(self) -> None:
        self._engine.close()
