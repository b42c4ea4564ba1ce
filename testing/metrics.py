"""Metrics of a request, from the times of its events, and statistics over many requests.

- TTFT: arrival of the request, its conversation not yet read, to the first text.
- ITL: first text to last text, over the tokens that came after the first text.
- TTFB: arrival to the first audio chunk.
- RTF: (arrival of the last chunk - arrival of the request) / duration of the audio.
- An underrun: a player that starts at the first sample has played all that it has before the next
  chunk is there. It waits, and goes on with that chunk.

A reply that a token limit cut is as long as the limit, not as the model would have it: what depends
on the length is summed up apart from that of complete replies.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from qwen3_omni_neuron.runtime.schedule import Playback

PERCENTILES = (50, 90, 95, 99)
# A limit can't change what comes before it.
BEFORE_ANY_LIMIT = ("ttft_s", "itl_s", "ttfb_s")
MEASURED = (*BEFORE_ANY_LIMIT, "total_s", "audio_s", "rtf", "text_tokens", "frames", "silent_s")
SAME_MOMENT_S = 1e-9  # rounding of sums of samples


@dataclass(frozen=True)
class TextArrival:
    """Text that arrived at a time, by the clock, with its number of tokens."""

    at_s: float
    tokens: int


@dataclass(frozen=True)
class ChunkArrival:
    """An audio chunk that arrived at a time, by the clock."""

    at_s: float
    samples: int
    frames: int


@dataclass(frozen=True)
class RequestEvents:
    """One request as its caller saw it.

    Times are of one clock, in seconds. arrived_s: before its conversation was read. finish reasons:
    "stop", "length" (a limit cut it), and for the talker "no_speech".
    """

    arrived_s: float
    texts: tuple[TextArrival, ...]
    chunks: tuple[ChunkArrival, ...]
    finished_s: float
    thinker_finish_reason: str
    talker_finish_reason: str
    sample_rate: int = 24000


@dataclass(frozen=True)
class RequestMetrics:
    """See the top of this file. None: there was no text, no second text, or no audio.

    underruns: how often the player waited; silent_s: the sum of these waits. truncated: a limit cut
    the text, the speech or both.
    """

    ttft_s: float | None
    itl_s: float | None
    ttfb_s: float | None
    total_s: float
    audio_s: float
    rtf: float | None
    text_tokens: int
    frames: int
    underruns: int
    silent_s: float
    thinker_finish_reason: str
    talker_finish_reason: str
    truncated: bool


def request_metrics(events: RequestEvents) -> RequestMetrics:
    """Return the figures of one request."""
    arrived_s, texts, chunks = events.arrived_s, events.texts, events.chunks
    audio_s = sum(chunk.samples for chunk in chunks) / events.sample_rate
    underruns, silent_s = playback(chunks, events.sample_rate)
    reasons = (events.thinker_finish_reason, events.talker_finish_reason)
    return RequestMetrics(
        ttft_s=texts[0].at_s - arrived_s if texts else None,
        itl_s=_inter_token_s(texts),
        ttfb_s=chunks[0].at_s - arrived_s if chunks else None,
        total_s=events.finished_s - arrived_s,
        audio_s=audio_s,
        rtf=(chunks[-1].at_s - arrived_s) / audio_s if audio_s else None,
        text_tokens=sum(text.tokens for text in texts),
        frames=sum(chunk.frames for chunk in chunks),
        underruns=underruns,
        silent_s=silent_s,
        thinker_finish_reason=reasons[0],
        talker_finish_reason=reasons[1],
        truncated="length" in reasons,
    )


def playing(chunks: Sequence[ChunkArrival], sample_rate: float) -> list[tuple[float, float]]:
    """Return the span in which a player that starts at the first sample plays each chunk."""
    player = Playback()
    return [player.arrived(chunk.samples / sample_rate, chunk.at_s) for chunk in chunks]


def silences(chunks: Sequence[ChunkArrival], sample_rate: float) -> list[tuple[float, float]]:
    """Return the spans in which that player waits for a chunk.

    A chunk that arrives at the moment when the player needs it is in time.
    """
    spans = pairwise(playing(chunks, sample_rate))
    gaps = [(until_s, start_s) for (_, until_s), (start_s, _) in spans]
    return [(from_s, to_s) for from_s, to_s in gaps if to_s - from_s > SAME_MOMENT_S]


def playback(chunks: Sequence[ChunkArrival], sample_rate: float) -> tuple[int, float]:
    """Return how often that player waits, and the sum of these waits."""
    waits = silences(chunks, sample_rate)
    return len(waits), sum((to_s - from_s for from_s, to_s in waits), 0.0)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90, p95 and p99, or None if there are no values."""
    if not values:
        return None
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in PERCENTILES}


def distribution(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return count, mean and percentiles of the values that are not None; None without any."""
    there = [value for value in values if value is not None]
    found = percentiles(there)
    if found is None:
        return None
    return {"count": len(there), "mean": sum(there) / len(there), **found}


def summarize(requests: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Return distributions of the figures, and the number of requests in each.

    "all": figures that no limit changes, over all requests. "complete" and "truncated": every
    figure, over the requests that ended by themselves, and over those that a limit cut.
    """
    complete = [request for request in requests if not request.truncated]
    truncated = [request for request in requests if request.truncated]
    return {
        "requests": len(requests),
        "truncated_requests": len(truncated),
        "truncated_text": sum(r.thinker_finish_reason == "length" for r in requests),
        "truncated_speech": sum(r.talker_finish_reason == "length" for r in requests),
        "without_speech": sum(r.ttfb_s is None for r in requests),
        "underruns": sum(r.underruns for r in requests),
        "requests_with_underruns": sum(r.underruns > 0 for r in requests),
        "all": _distributions(requests, BEFORE_ANY_LIMIT),
        "complete": _distributions(complete, MEASURED),
        "truncated": _distributions(truncated, MEASURED),
    }


def _distributions(requests: Sequence[RequestMetrics], names: Sequence[str]) -> dict[str, Any]:
    rows = [asdict(request) for request in requests]
    return {name: distribution([row[name] for row in rows]) for name in names}


def _inter_token_s(texts: Sequence[TextArrival]) -> float | None:
    tokens = sum(text.tokens for text in texts[1:])
    return (texts[-1].at_s - texts[0].at_s) / tokens if tokens else None
