"""testing/metrics.py, and how a request is watched, on a clock that is set by hand."""

from collections import Counter

import pytest

from qwen3_omni_neuron.runtime.pipeline import Pipeline
from testing.metrics import ChunkArrival, RequestEvents, TextArrival, request_metrics
from testing.observed import Recorder
from testing.simulation import Simulation, finish
from testing.timed_engines import Sizes, Times

RATE = 24000


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


def test_a_watched_request_is_the_same_and_each_call_for_it_is_noted(config) -> None:
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
