"""Requests watched from outside: when their events reach the caller, and when engines were called.

Engine calls are watched from between the pipeline and the engines, so it makes no difference in
which process or on which device the engines run. Without --timeline nothing stands there.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.events import AudioChunk, Event, Finished, TextDelta
from qwen3_omni_neuron.prompt.messages import Messages
from testing.metrics import ChunkArrival, RequestEvents, TextArrival

Engine = TypeVar("Engine")
Result = TypeVar("Result")

# The stage of each engine method, whose first argument is one slot or several.
THINKER_STAGES = {"prefill": "thinker prefill", "step": "thinker decode"}
TALKER_STAGES = {
    "prepare": "talker prepare",
    "prefill": "talker prefill",
    "predict": "code predictor",
    "step": "talker step",
}
VOCODER_STAGES = {"start": "code2wav", "step": "code2wav"}
PROMPT_STAGES = ("thinker prefill", "talker prepare")  # each once per request


@dataclass(frozen=True)
class Observed:
    """Events of a request, and its result.

    submitted_s: when its conversation had been read, by the clock of the events. slot: its slot in
    every engine.
    """

    events: RequestEvents
    result: SpeechResult
    submitted_s: float
    slot: int


def observe(
    omni: Qwen3Omni,
    messages: Messages,
    options: dict[str, Any],
    now: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Ask for speech and take every event as it arrives. Raises the request's own errors.

    The clock starts before the conversation is read: decoding audio and computing its features is
    part of what a caller waits for.
    """
    arrived_s = now()
    with omni.stream(messages, **options) as stream:
        submitted_s = now()
        events, result = take_events(stream, arrived_s, now)
        slot = stream.slot
    # The engines may begin before this thread reads the clock again.
    submitted_s = min(submitted_s, arrived_s + result.timings.queued_s)
    return Observed(events, result, submitted_s, slot)


def take_events(
    stream: Iterable[Event], arrived_s: float, now: Callable[[], float]
) -> tuple[RequestEvents, SpeechResult]:
    """Take a stream's events as they arrive. Returns their times, and the result at the end."""
    texts, chunks = [], []
    for event in stream:
        at_s = now()
        if isinstance(event, TextDelta):
            texts.append(TextArrival(at_s, len(event.token_ids)))
        elif isinstance(event, AudioChunk):
            chunks.append(ChunkArrival(at_s, len(event.samples), event.frames))
    assert isinstance(event, Finished), "a stream ends with its result"
    result = event.result
    reasons = result.thinker_finish_reason, result.talker_finish_reason
    events = RequestEvents(
        arrived_s, tuple(texts), tuple(chunks), at_s, *reasons, result.sample_rate
    )
    return events, result


@dataclass(frozen=True)
class Span:
    """One engine call, by the recorder's clock in seconds. slots: the slots in the call."""

    stage: str
    start_s: float
    end_s: float
    slots: tuple[int, ...]


class Recorder:
    """The calls of all engines that it wraps.

    Each stage's thread appends its own, and a list's append is atomic.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        """now: the clock of the pipeline, so that spans and events share their times."""
        self._now = now
        self._spans: list[Span] = []

    def wrap(self, engines: Engines) -> Engines:
        """Return the same engines, watched: for `Qwen3Omni.load(wrap_engines=...)`."""
        return replace(
            engines,
            thinker=_watched(engines.thinker, THINKER_STAGES, self),
            talker=engines.talker and _watched(engines.talker, TALKER_STAGES, self),
            vocoder=engines.vocoder and _watched(engines.vocoder, VOCODER_STAGES, self),
        )

    def timed(
        self, stage: str, slots: Sequence[int], call: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Make a call and note it. A call that raises is noted as well, as it took time."""
        start_s = self._now()
        try:
            return call(*arguments)
        finally:
            self._spans.append(Span(stage, start_s, self._now(), tuple(slots)))

    def seconds(self, start_s: float, end_s: float) -> dict[str, float]:
        """Return the seconds of the calls of each stage between two times."""
        found: dict[str, float] = {}
        for span in list(self._spans):
            inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
            if inside_s > 0:
                found[span.stage] = found.get(span.stage, 0.0) + inside_s
        return found

    def of_request(self, slot: int, admitted_s: float) -> list[Span]:
        """Return the calls for the request that got `slot` at `admitted_s`, ordered by start.

        The slot's next request may begin before this one's caller has seen the end, so the list
        ends before a second prompt.
        """
        spans = [s for s in self._spans if slot in s.slots and s.start_s >= admitted_s]
        spans.sort(key=lambda span: span.start_s)
        seen: set[str] = set()
        for index, span in enumerate(spans):
            if span.stage in PROMPT_STAGES and span.stage in seen:
                return spans[:index]
            seen.add(span.stage)
        return spans


class _Watched:
    """An engine whose calls are noted; all other attributes are the engine's own."""

    def __init__(self, engine: object, stages: Mapping[str, str], recorder: Recorder):
        self._engine, self._stages, self._recorder = engine, stages, recorder

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._engine, name)
        if name not in self._stages:
            return own

        def noted(slots: int | Sequence[int], *arguments: Any) -> Any:
            shared = (slots,) if isinstance(slots, int) else slots
            return self._recorder.timed(self._stages[name], shared, own, slots, *arguments)

        return noted


def _watched(engine: Engine, stages: Mapping[str, str], recorder: Recorder) -> Engine:
    return cast(Engine, _Watched(engine, stages, recorder))
