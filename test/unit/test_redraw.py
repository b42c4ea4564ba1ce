"""Runaway speech that is drawn anew, over engines that only take time.

The talker's frames depend on all inputs and frames before them, and not on random numbers: after it
has gone back, it makes the frames that it would have made at once.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.sampling import RequestRandom
from qwen3_omni_neuron.events import AudioChunk, SpeechResult
from qwen3_omni_neuron.runtime.runaway import (
    CYCLE_BEGINS,
    KEPT_FRAMES,
    SILENT_FRAMES,
)
from qwen3_omni_neuron.runtime.stream import SpeechStream
from testing.simulation import Simulation, finish
from testing.timed_engines import (
    FRAME_SAMPLES,
    LATENCY_SAMPLES,
    Sizes,
    TimedTalker,
    TimedVocoder,
    Times,
    samples_of,
)

WORDS = [5, 0, 17, 17, 30, 8, 91]
TIMES = Times(talker_step_s=0.02, predict_s=0.01, vocoder_s=0.01)
SOUND = 40  # frames before the silence, or before the cycle
ALL = 150  # frames before the talker ends by itself
CHUNKS = [None, (1,), (25,)]
Silent = Callable[[Callable[[int], bool]], None]
Forced = Callable[[Callable[[int], int | None]], None]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Silent:
    """Makes frames silent, by their number."""

    def make(is_silent: Callable[[int], bool]) -> None:
        def decoded(
            self: TimedVocoder, slot: int, last: list[torch.Tensor], codes: torch.Tensor
        ) -> NDArray[np.float32]:
            first = heard[slot] if last else 0
            samples = decode(self, slot, last, codes)
            for frame in range(first, first + len(codes)):
                if is_silent(frame):
                    start = (frame - first) * FRAME_SAMPLES - (0 if last else LATENCY_SAMPLES)
                    samples[max(0, start) : start + FRAME_SAMPLES] = 0
            heard[slot] = first + len(codes)
            return samples

        heard: dict[int, int] = {}
        decode = TimedVocoder._decode
        monkeypatch.setattr(TimedVocoder, "_decode", decoded)

    return make


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Forces codes 0 of all replies, by the number of the frame; None: the talker's own."""

    def make(code_of: Callable[[int], int | None]) -> None:
        def logits(self: TimedTalker, slots: list[int]) -> torch.Tensor:
            rows = own(self, slots)
            for row, slot in zip(rows, slots, strict=True):
                code = code_of(len(self._frames[slot]))
                if code is not None:
                    row.zero_()
                    row[code] = 1
            return rows

        own = TimedTalker._logits
        monkeypatch.setattr(TimedTalker, "_logits", logits)

    return make


def start(
    simulation: Simulation, limit: int = 4000, greedy: bool = False, **options: Any
) -> SpeechStream:
    options = {"runaway_speech": "redraw"} | options
    request = simulation.request(WORDS, limit, **options)
    sampled = replace(request.options, predictor_do_sample=not greedy)
    return SpeechStream(simulation.pipeline, replace(request, options=sampled), simulation)


def went_back(simulation: Simulation) -> int:
    return len(simulation.called("talker.go_back"))


def assert_speech(
    simulation: Simulation, result: SpeechResult, frames: int, quiet: range = range(0)
) -> None:
    """Assert that codes and samples are those of one pass, in which some frames are silent."""
    codes = simulation.expected_codes(WORDS, frames)
    assert result.codes.tolist() == [frame.tolist() for frame in codes]
    samples = samples_of(codes)
    starts, stops = (n * FRAME_SAMPLES - LATENCY_SAMPLES for n in (quiet.start, quiet.stop))
    samples[max(0, starts) : max(0, stops)] = 0
    assert np.array_equal(result.audio, samples)


@pytest.mark.parametrize("chunk_frames", CHUNKS)
def test_speech_goes_on_from_its_last_sound_as_if_the_silence_had_never_been(
    simulate: Callable[..., Simulation],
    silent: Silent,
    chunk_frames: tuple[int, ...] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulation = simulate(TIMES, frames=ALL)
    silent(lambda frame: frame >= SOUND and not went_back(simulation))
    result = finish(start(simulation, chunk_frames=chunk_frames))
    assert (result.talker_finish_reason, result.redrawn) == ("stop", True)
    assert_speech(simulation, result, ALL, range(SOUND, SOUND + KEPT_FRAMES))
    assert went_back(simulation) == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "is drawn anew: silence" in record.message and "42 are kept" in record.message
    simulation.assert_idle()


@pytest.mark.parametrize("sound", [SOUND, 4])
@pytest.mark.parametrize("chunk_frames", [*CHUNKS, (100,)])
def test_a_cycle_is_dropped_but_for_its_beginning(
    simulate: Callable[..., Simulation],
    forced: Forced,
    chunk_frames: tuple[int, ...] | None,
    sound: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The speech after it is that of a reply in which the same frames were forced.

    A cycle counts from the first frame on that was made after the whole text was taken.
    """
    sizes = Sizes(chunk_frames=(1, 2, 4, 16, 25, 100))
    simulation = simulate(TIMES, sizes, frames=ALL)
    kept = max(sound, len(WORDS)) + 3 + CYCLE_BEGINS - 1

    def cycle(frame: int) -> int | None:
        if frame < sound or (went_back(simulation) and frame >= kept):
            return None
        return frame % 3

    forced(cycle)
    result = finish(start(simulation, chunk_frames=chunk_frames))
    assert (result.talker_finish_reason, result.redrawn) == ("stop", True)
    assert went_back(simulation) == 1
    assert f"of which {kept} are kept" in caplog.text
    same = simulate(TIMES, sizes, frames=ALL)
    forced(lambda frame: frame % 3 if sound <= frame < kept else None)
    expected = finish(same.start(WORDS, 4000, runaway_speech="end"))
    assert result.codes.tolist() == expected.codes.tolist()
    assert np.array_equal(result.audio, expected.audio)


@pytest.mark.parametrize("chunk_frames", CHUNKS)
def test_speech_that_runs_away_again_ends(
    simulate: Callable[..., Simulation], silent: Silent, chunk_frames: tuple[int, ...] | None
) -> None:
    silent(lambda frame: frame >= SOUND)
    simulation = simulate(TIMES)
    result = finish(start(simulation, chunk_frames=chunk_frames))
    assert (result.talker_finish_reason, result.redrawn) == ("runaway", True)
    assert went_back(simulation) == 1
    frames = len(result.codes)
    assert SOUND + KEPT_FRAMES <= frames < SOUND + KEPT_FRAMES + SILENT_FRAMES
    assert_speech(simulation, result, frames, range(SOUND, frames))
    simulation.assert_idle()


@pytest.mark.parametrize("chunk_frames", CHUNKS)
def test_a_pause_is_passed_on_with_the_sound_after_it(
    simulate: Callable[..., Simulation], silent: Silent, chunk_frames: tuple[int, ...] | None
) -> None:
    """Two of them, and a silence in which the talker ends by itself; the reply is the same."""
    pause, end = range(30, 30 + SILENT_FRAMES - 1), range(90, 100)
    silent(lambda frame: frame in pause or frame in end)
    simulation = simulate(TIMES, frames=100)
    events = list(start(simulation, chunk_frames=chunk_frames))
    result: SpeechResult = events[-1].result  # type: ignore[union-attr]
    assert (result.talker_finish_reason, result.redrawn) == ("stop", False)
    assert not went_back(simulation)
    plain = finish(simulate(TIMES, frames=100).start(WORDS, 4000, runaway_speech="end"))
    assert result.codes.tolist() == plain.codes.tolist()
    assert np.array_equal(result.audio, plain.audio)
    chunks = [event for event in events if isinstance(event, AudioChunk)]
    assert sum(chunk.frames for chunk in chunks) == 100
    for chunk, later in pairwise(chunks):
        assert later.first_sample == chunk.first_sample + len(chunk.samples)
        sound = result.audio[: later.first_sample].nonzero()[0][-1]
        assert later.first_sample - 1 - sound <= KEPT_FRAMES * FRAME_SAMPLES, "silence was sent"
    simulation.assert_idle()


@pytest.mark.parametrize("chunk_frames", CHUNKS)
def test_the_first_sample_is_not_later(
    simulate: Callable[..., Simulation], silent: Silent, chunk_frames: tuple[int, ...] | None
) -> None:
    """Not even where the speech of one word begins with silence."""
    silent(lambda frame: frame < 20)
    results = []
    for option in ("redraw", "end"):
        simulation = simulate(TIMES, frames=60)
        request = simulation.request([5], 4000, runaway_speech=option, chunk_frames=chunk_frames)
        options = replace(request.options, predictor_do_sample=True)
        request = replace(request, options=options)
        results.append(finish(SpeechStream(simulation.pipeline, request, simulation)))
    assert results[0].timings.ttfb_s == results[1].timings.ttfb_s
    assert np.array_equal(results[0].audio, results[1].audio)


@pytest.mark.parametrize("why", ["greedy", "sizes", "frames"])
def test_what_can_not_be_drawn_anew_ends(
    simulate: Callable[..., Simulation], silent: Silent, why: str
) -> None:
    """Greedy speech would be the same; without chunks of one frame no frame can be reached again;
    nothing shows where speech that is too long has left its words."""
    simulation = simulate(TIMES, Sizes(chunk_frames=(4, 16) if why == "sizes" else (1, 16)))
    if why != "frames":
        silent(lambda frame: frame >= SOUND)
    result = finish(start(simulation, greedy=why == "greedy", chunk_frames=(16,)))
    assert (result.talker_finish_reason, result.redrawn) == ("runaway", False)
    assert not went_back(simulation)
    if why != "frames":
        assert len(result.codes) <= SOUND + KEPT_FRAMES + 16


def test_one_of_a_batch_goes_back_and_the_others_do_not_change(
    simulate: Callable[..., Simulation], silent: Silent
) -> None:
    simulation = simulate(TIMES, frames=ALL)
    silent(lambda frame: frame >= SOUND and not went_back(simulation))
    options = ("keep", "redraw", "keep")
    streams = [start(simulation, runaway_speech=o, chunk_frames=(4,)) for o in options]
    results = [finish(stream) for stream in streams]
    assert [r.redrawn for r in results] == [False, True, False]
    codes = [frame.tolist() for frame in simulation.expected_codes(WORDS, ALL)]
    assert all(result.codes.tolist() == codes for result in results)
    assert_speech(simulation, results[1], ALL, range(SOUND, SOUND + KEPT_FRAMES))
    steps = [call.slots for call in simulation.called("talker.step")]
    assert max(map(len, steps)) == 3 and steps[-1] == (streams[1].slot,)
    simulation.assert_idle()


def test_the_second_drawing_has_random_numbers_of_its_own(
    simulate: Callable[..., Simulation], silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drawing takes its numbers in order, so that a seed gives one reply."""
    simulation = simulate(TIMES, frames=ALL)
    silent(lambda frame: frame >= SOUND and not went_back(simulation))
    drawn: list[list[PredictorSampling]] = [[], []]
    predict = TimedTalker.predict

    def recorded(self: TimedTalker, slots: Any, code0: Any, sampling: Any) -> torch.Tensor:
        drawn[went_back(simulation)] += sampling
        return predict(self, slots, code0, sampling)

    monkeypatch.setattr(TimedTalker, "predict", recorded)
    finish(start(simulation, chunk_frames=(4,)))
    random = RequestRandom(0)
    for samplings, uniforms in zip(drawn, (random.talker, random.redraw), strict=True):
        assert len(samplings) > SOUND
        for frame in samplings:
            assert np.array_equal(frame.uniforms, uniforms(15))  # type: ignore[arg-type]


def test_a_penalty_counts_the_kept_codes_alone(
    simulate: Callable[..., Simulation], silent: Silent
) -> None:
    simulation = simulate(TIMES, frames=ALL)
    silent(lambda frame: frame >= SOUND and not went_back(simulation))
    request = simulation.request(WORDS, 4000, runaway_speech="redraw", chunk_frames=(4,))
    options = replace(request.options, predictor_do_sample=True, talker_repetition_penalty=1.5)
    stream = SpeechStream(simulation.pipeline, replace(request, options=options), simulation)
    (task,) = simulation.pipeline._talker._tasks
    first = task.sampler
    result = finish(stream)
    assert task.sampler is not first and task.sampler.penalties is not None
    penalized = task.sampler.allowed[task.sampler.penalties == 1.5]  # type: ignore[index]
    end = simulation.pipeline._config.talker.codec_eos_id  # type: ignore[union-attr]
    assert set(penalized) == {*result.codes[:, 0], end}


def test_an_end_that_is_drawn_while_its_frames_are_dropped_does_not_count(
    simulate: Callable[..., Simulation],
) -> None:
    simulation = simulate(TIMES, frames=60)
    talker = simulation.pipeline._talker
    sample = talker._sample_ids

    def sample_late(samplers: Any, logits: Any) -> list[int]:
        (code,) = sample(samplers, logits)
        live = talker._tasks[0].live
        if code == talker._config.codec_eos_id and not went_back(simulation):
            with talker._lock:  # as the vocoder's stage does it
                del live.codes[55:], live.end_probabilities[55:]
                live.redrawn = live.goes_back = True
        return [code]

    talker._sample_ids = sample_late
    result = finish(start(simulation, chunk_frames=(25,)))
    assert (result.talker_finish_reason, result.redrawn) == ("stop", True)
    assert_speech(simulation, result, 60)


def test_a_failure_on_the_way_back_ends_the_request_alone(
    simulate: Callable[..., Simulation], silent: Silent
) -> None:
    simulation = simulate(TIMES, frames=ALL)
    silent(lambda frame: frame >= SOUND)

    def fail(name: str, slots: Any) -> None:
        if name == "talker.go_back":
            raise ValueError("no way back")

    simulation.on_call = fail  # type: ignore[method-assign]
    stream, other = start(simulation, chunk_frames=(4,)), simulation.start(WORDS, ALL)
    with pytest.raises(ValueError, match="no way back"):
        finish(stream)
    assert len(finish(other).codes) == ALL
    simulation.assert_idle()
