"""Somebody who listens: the sound starts at its first sample, and must not run dry."""

from collections.abc import Iterable
from dataclasses import dataclass

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished, SpeechResult
from qwen3_omni_neuron.runtime.clock import Clock

ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Heard:
    """underruns: how often there was nothing to play before the end; silent_s: for how long in all;
    chunks: sizes of the chunks in frames; ended_s: when the last event came, by the clock."""

    result: SpeechResult
    underruns: int
    silent_s: float
    chunks: tuple[int, ...]
    ended_s: float


def listen(events: Iterable[Event], clock: Clock) -> Heard:
    """Take all events of a request as they come."""
    end_s: float | None = None  # of the sound that is there
    underruns, silent_s = 0, 0.0
    chunks: list[int] = []
    for event in events:
        now = clock.now()
        if isinstance(event, AudioChunk):
            if end_s is not None and now > end_s + ROUNDING_S:
                underruns, silent_s = underruns + 1, silent_s + now - end_s
            end_s = max(now, end_s or now) + len(event.samples) / SAMPLE_RATE
            chunks.append(event.frames)
    assert isinstance(event, Finished)
    return Heard(event.result, underruns, silent_s, tuple(chunks), clock.now())
