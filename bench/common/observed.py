"""One request, watched from its caller's side."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.common.metrics import ChunkArrival, RequestEvents, TextArrival
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.conversation.messages import Messages
from qwen3_omni_neuron.events import AudioChunk, Finished, TextDelta


@dataclass(frozen=True)
class Observed:
    """What came back, and when. submitted_s: when the conversation had been read, by the clock of
    the events. slot: its line of every engine."""

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
    """Ask for speech and take every event as it comes. Raises what the request does.

    The clock starts before the conversation is read: decoding sound and making features of it is
    part of what a caller waits for.
    """
    texts, chunks = [], []
    arrived_s = now()
    with omni.stream(messages, **options) as stream:
        submitted_s = now()
        for event in stream:
            at_s = now()
            if isinstance(event, TextDelta):
                texts.append(TextArrival(at_s, len(event.token_ids)))
            elif isinstance(event, AudioChunk):
                chunks.append(ChunkArrival(at_s, len(event.samples), event.frames))
        assert isinstance(event, Finished), "a stream ends with its result"
        result, slot = event.result, stream.slot
    # The engines may begin before this thread has looked at the clock again.
    submitted_s = min(submitted_s, arrived_s + result.timings.queued_s)
    events = RequestEvents(
        arrived_s,
        tuple(texts),
        tuple(chunks),
        at_s,
        result.thinker_finish_reason,
        result.talker_finish_reason,
        result.sample_rate,
    )
    return Observed(events, result, submitted_s, slot)
