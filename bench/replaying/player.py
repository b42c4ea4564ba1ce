"""Somebody who listens: the sound starts at its first sample, and must not run dry."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.common.metrics import ChunkArrival, playback
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished, SpeechResult
from qwen3_omni_neuron.runtime.clock import Clock


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
    arrivals: list[ChunkArrival] = []
    for event in events:
        if isinstance(event, AudioChunk):
            arrivals.append(ChunkArrival(clock.now(), len(event.samples), event.frames))
    assert isinstance(event, Finished)
    underruns, silent_s = playback(arrivals, SAMPLE_RATE)
    chunks = tuple(arrival.frames for arrival in arrivals)
    return Heard(event.result, underruns, silent_s, chunks, clock.now())
