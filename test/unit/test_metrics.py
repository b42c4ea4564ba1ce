"""testing/metrics.py, and how a request is watched, on a clock that is set by hand."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron.events import AudioChunk, Event, Finished, SpeechResult, TextDelta, Timings
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from testing.metrics import (
    ChunkArrival,
    RequestEvents,
    TextArrival,
    distribution,
    playback,
    request_metrics,
    summarize,
)
from testing.observed import Recorder, Span, observe
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, Times

RATE = 24000
RANKS = ("p50", "p90", "p95", "p99")


def events(
    *,
    texts: tuple[tuple[float, int], ...] = ((1.5, 1), (1.7, 1)),
    chunks: tuple[tuple[float, int, int], ...] = ((2.0, RATE, 12),),
    finished_s: float = 3.0,
    thinker: str = "stop",
    talker: str = "stop",
) -> RequestEvents:
    """A request that arrived at 1.0 s."""
    return RequestEvents(
        1.0,
        tuple(TextArrival(*text) for text in texts),
        tuple(ChunkArrival(*chunk) for chunk in chunks),
        finished_s,
        thinker,
        talker,
        RATE,
    )


def test_every_figure_follows_from_the_times_of_the_events() -> None:
    found = request_metrics(
        events(
            texts=((1.25, 1), (1.5, 2), (2.0, 3)),
            chunks=((1.75, RATE, 13), (2.5, 3 * RATE, 37)),
            finished_s=2.75,
        )
    )
    assert found.ttft_s == 0.25
    assert found.itl_s == pytest.approx(0.75 / 5)
    assert found.ttfb_s == 0.75
    assert found.total_s == 1.75
    assert found.audio_s == 4.0
    assert found.rtf == 1.5 / 4  # the last chunk came 1.5 s after the request
    assert (found.text_tokens, found.frames) == (6, 50)
    assert (found.underruns, found.silent_s, found.truncated) == (0, 0.0, False)


def test_what_never_came_has_no_figure() -> None:
    silent = request_metrics(events(texts=((1.5, 1),), chunks=(), talker="no_speech"))
    assert (silent.ttft_s, silent.itl_s) == (0.5, None)
    assert (silent.ttfb_s, silent.rtf, silent.audio_s, silent.underruns) == (None, None, 0.0, 0)
    assert request_metrics(events(texts=())).ttft_s is None


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], (0, 0.0)),
        ([(5.0, 1.0)], (0, 0.0)),
        ([(5.0, 1.0), (5.9, 1.0)], (0, 0.0)),
        ([(5.0, 1.0), (6.0, 1.0)], (0, 0.0)),  # at the very moment that it is needed
        ([(5.0, 1.0), (6.25, 1.0)], (1, 0.25)),
        # All behind it are late by what the first wait took, and are in time after it.
        ([(5.0, 1.0), (6.5, 1.0), (7.5, 1.0)], (1, 0.5)),
        ([(5.0, 1.0), (6.5, 1.0), (7.75, 1.0), (8.0, 1.0)], (2, 0.75)),
        # What came early is a reserve for what comes late.
        ([(5.0, 1.0), (5.1, 2.0), (7.9, 1.0), (9.5, 1.0)], (1, 0.5)),
    ],
)
def test_underruns_are_those_of_a_player_that_starts_at_the_first_sample(
    chunks: list[tuple[float, float]], expected: tuple[int, float]
) -> None:
    arrivals = [ChunkArrival(at_s, int(seconds * RATE), 1) for at_s, seconds in chunks]
    waits, silent_s = playback(arrivals, RATE)
    assert (waits, silent_s) == (expected[0], pytest.approx(expected[1]))


def test_a_distribution_leaves_out_what_is_not_there() -> None:
    found = distribution([3.0, None, 1.0])
    assert found is not None
    assert (found["count"], found["mean"], found["p50"]) == (2, 2.0, 2.0)
    assert found["p90"] == pytest.approx(2.8)
    assert distribution([None]) is None


def test_runs_that_a_limit_cut_are_counted_and_kept_apart() -> None:
    fast = {"chunks": ((1.5, RATE, 12),), "finished_s": 1.5}  # RTF 0.5
    slow = {"chunks": ((2.0, RATE, 12), (9.0, RATE, 12)), "finished_s": 9.0}  # RTF 4
    requests = [
        request_metrics(events(**fast)),
        request_metrics(events(**slow, talker="length")),
        request_metrics(events(**slow, thinker="length")),
        request_metrics(events(chunks=(), talker="no_speech")),
    ]
    found = summarize(requests)
    counts = [found[f"truncated_{what}"] for what in ("requests", "text", "speech")]
    assert counts == [2, 1, 1]
    assert (found["requests"], found["without_speech"]) == (4, 1)
    assert (found["underruns"], found["requests_with_underruns"]) == (2, 2)
    assert found["complete"]["rtf"] == {"count": 1, "mean": 0.5, **dict.fromkeys(RANKS, 0.5)}
    assert found["truncated"]["rtf"]["mean"] == 4.0
    assert found["complete"]["total_s"]["count"] == found["truncated"]["total_s"]["count"] == 2
    # What comes before any limit is over all of them, and what a limit changes is not.
    assert found["all"]["ttfb_s"]["count"] == 3
    assert found["all"].keys() == {"ttft_s", "itl_s", "ttfb_s"}


class HandClock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowStream(Iterator[Event]):
    """Each event takes its time."""

    slot = 3

    def __init__(self, clock: HandClock, script: list[tuple[float, Event]]):
        self._clock, self._script = clock, iter(script)

    def __next__(self) -> Event:
        seconds, event = next(self._script)
        self._clock.now_s += seconds
        return event

    def __enter__(self) -> "SlowStream":
        return self

    def __exit__(self, *_: object) -> None:
        return


class SlowReader:
    """Takes 2 s to read a conversation, as `Qwen3Omni.stream` does before it returns."""

    def __init__(self, clock: HandClock, script: list[tuple[float, Event]]):
        self._clock, self._script = clock, script

    def stream(self, messages: Any, **options: Any) -> SlowStream:
        self._clock.now_s += 2.0
        return SlowStream(self._clock, self._script)


def test_ttft_and_ttfb_include_the_reading_of_the_conversation() -> None:
    clock = HandClock()
    chunk = AudioChunk(np.zeros(RATE, np.float32), 0, 13)
    result = SpeechResult(
        text="Hi",
        token_ids=[1, 2, 3],
        codes=np.zeros((26, 16), np.int64),
        audio=np.zeros(2 * RATE, np.float32),
        sample_rate=RATE,
        thinker_finish_reason="stop",
        talker_finish_reason="length",
        timings=Timings(1.75, 0, 0, 0, 2.0, 0, 5, 0, 3, 26),
        seed=0,
    )
    script: list[tuple[float, Event]] = [
        (0.5, TextDelta("H", [1])),
        (0.25, chunk),
        (0.25, TextDelta("i", [2, 3])),
        (1.0, chunk),
        (0.125, Finished(result)),
    ]
    seen = observe(SlowReader(clock, script), [], {}, clock)  # type: ignore[arg-type]
    found = request_metrics(seen.events)
    assert (found.ttft_s, found.ttfb_s, found.total_s) == (2.5, 2.75, 4.125)
    assert found.rtf == 4.0 / 2.0
    assert found.itl_s == 0.25
    assert (found.text_tokens, found.frames, found.truncated) == (3, 26, True)
    # It had a slot before its caller looked at the clock again.
    assert (seen.submitted_s, seen.slot, seen.result) == (101.75, 3, result)


TIMES = Times(
    thinker_prefill_s=0.5,
    thinker_step_s=0.25,
    talker_prepare_s=0.125,
    talker_prefill_s=0.0625,
    talker_step_s=0.03125,
    predict_s=0.015625,
    vocoder_s=0.0078125,
)
TOOK = {
    "thinker prefill": TIMES.thinker_prefill_s,
    "thinker decode": TIMES.thinker_step_s,
    "talker prepare": TIMES.talker_prepare_s,
    "talker prefill": TIMES.talker_prefill_s,
    "talker step": TIMES.talker_step_s,
    "code predictor": TIMES.predict_s,
    "code2wav": TIMES.vocoder_s,
}


def test_a_watched_request_is_the_same_and_each_call_for_it_is_noted(config: OmniConfig) -> None:
    simulation = Simulation(config, TIMES, Sizes(slots=2))
    simulation.pipeline.close()
    recorder = Recorder(simulation.clock.now)
    engines = recorder.wrap(simulation.pipeline._engines)
    simulation.pipeline = Pipeline(engines, config, 16, simulation.clock)
    tokens, frames = [5, 0, 17], (4, 6, 8)
    # The first two share calls, and the third waits for a slot of theirs.
    streams = [simulation.start(tokens, count, chunk_frames=(2,)) for count in frames]
    assert {streams[0].slot, streams[1].slot} == {0, 1}
    assert streams[2].slot == -1
    results = [finish(stream) for stream in streams]
    assert streams[2].slot in (0, 1)
    for stream, result, count in zip(streams, results, frames, strict=True):
        simulation.assert_right(result, tokens, count)
        spans = recorder.of_request(stream.slot, result.timings.queued_s)
        assert [s.start_s for s in spans] == sorted(s.start_s for s in spans)
        assert {s.stage: s.end_s - s.start_s for s in spans} == TOOK
        counts = Counter(s.stage for s in spans)
        assert (counts["code predictor"], counts["code2wav"]) == (count, count // 2)
        assert counts["thinker decode"] == len(tokens)
        assert [counts[s] for s in ("thinker prefill", "talker prepare", "talker prefill")] == [
            1
        ] * 3
        assert result.timings.rtf is not None
        last = max(s.end_s for s in spans if s.stage == "code2wav")
        assert last == pytest.approx(result.timings.rtf * result.timings.audio_s)
    shared = [s for s in recorder.of_request(streams[0].slot, 0.0) if len(s.slots) == 2]
    assert "talker step" in {s.stage for s in shared}
    simulation.pipeline.close()


def test_a_call_that_fails_is_noted_and_fails() -> None:
    recorder = Recorder(iter((1.0, 3.0)).__next__)
    with pytest.raises(ZeroDivisionError):
        recorder.timed("talker step", [2, 5], lambda: 1 // 0)
    assert recorder.of_request(5, 0.0) == [Span("talker step", 1.0, 3.0, (2, 5))]
