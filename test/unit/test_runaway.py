"""Runaway speech: the guard alone, and the pipeline over engines that only take time."""

import logging
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.runtime.runaway import (
    CEILING,
    CYCLE_FRAMES,
    KEPT_FRAMES,
    LIKELY_END,
    LONGEST_PERIOD,
    PAUSE_FRAMES,
    SILENT_FRAMES,
    SILENT_POWER,
    Runaway,
    RunawayGuard,
    SpokenPace,
)
from testing.simulation import EOS, finish
from testing.timed_engines import FRAME_SAMPLES, LATENCY_SAMPLES, TimedVocoder

LOUD, QUIET = 1e-2, SILENT_POWER / 2
NEVER = 1e-14
Frame = tuple[float, int]  # power and code 0


def guard_of(tokens: int = 20, text: str = "", pace: SpokenPace | None = None) -> RunawayGuard:
    return RunawayGuard(0, tokens, text, pace or SpokenPace())


def speech(frames: int, seed: int = 0) -> list[Frame]:
    rng = random.Random(seed)
    return [(LOUD, rng.randrange(1000)) for _ in range(frames)]


def silence(frames: int) -> list[Frame]:
    return [(QUIET, 7)] * frames


def hear(
    guard: RunawayGuard, frames: Sequence[Frame], end: float = NEVER
) -> tuple[int, Runaway] | None:
    """Hear frames up to the one that shows a runaway. Returns that frame's number, from 1."""
    for power, code in frames:
        found = guard.hear(power, code, end)
        if found is not None:
            return guard.frames, found
    return None


def test_silence_ends_within_two_seconds_at_its_last_sound() -> None:
    found = hear(guard_of(), speech(50) + silence(100))
    assert found == (50 + SILENT_FRAMES, Runaway("silence", 50 + KEPT_FRAMES))
    assert SILENT_FRAMES * 0.08 < 2


@pytest.mark.parametrize("mark", ["…", "...", "\n\n", "\n  \n"])
def test_silence_that_the_text_asks_for_stays(mark) -> None:
    text = mark.join(["one", "two", "three"])
    pause = silence(SILENT_FRAMES + 2 * PAUSE_FRAMES - 1)
    assert hear(guard_of(text=text), speech(50) + pause + speech(9, 1)) is None
    assert hear(guard_of(text="one, two - three.\nfour"), speech(50) + pause) is not None


@pytest.mark.parametrize("period", range(1, LONGEST_PERIOD + 1))
def test_a_cycle_of_codes_ends_within_four_seconds_at_its_first_period(period) -> None:
    cycle = [(LOUD, code) for code in range(2000, 2000 + period)]
    found = hear(guard_of(), speech(50) + cycle * 60)
    assert found == (50 + CYCLE_FRAMES, Runaway("a cycle of codes", 50 + period))
    assert CYCLE_FRAMES * 0.08 < 4


def test_speech_ends_at_one_and_a_half_times_the_longest_that_its_words_can_take() -> None:
    pace = SpokenPace()
    most = int(CEILING * pace.longest_frames(20))
    assert hear(guard_of(20), speech(most)) is None
    found = hear(guard_of(20), speech(most + 1))
    assert found == (most + 1, Runaway("more frames than the words can take", most + 1))


@pytest.mark.parametrize("frames", [silence(400), [(LOUD, 3)] * 400, speech(2000)])
def test_nothing_is_cut_while_the_end_is_likely(frames) -> None:
    assert hear(guard_of(), speech(50) + frames, end=LIKELY_END) is None
    assert hear(guard_of(), speech(50) + frames, end=LIKELY_END / 2) is not None


# The pipeline over timed engines: token ids 5, 0, ... are words, codes never end.

WORDS = [5, 0, 17, 17, 30, 8, 91]


@pytest.fixture
def quiet_after(monkeypatch) -> Callable[[int], None]:
    """Makes every stream silent from a sample on."""

    def make(frames: int) -> None:
        def decoded(
            self: TimedVocoder, slot: int, last: list[torch.Tensor], codes: torch.Tensor
        ) -> NDArray[np.float32]:
            start = 0 if not last else heard[slot]
            samples = decode(self, slot, last, codes)
            heard[slot] = start + len(samples)
            samples[max(0, frames * FRAME_SAMPLES - LATENCY_SAMPLES - start) :] = 0
            return samples

        heard: dict[int, int] = {}
        decode = TimedVocoder._decode
        monkeypatch.setattr(TimedVocoder, "_decode", decoded)

    return make


@pytest.mark.parametrize("chunk_frames", [None, (1,), (4,), (25,), (2, 16)])
def test_silent_speech_ends_and_is_as_long_as_its_frames(
    simulate, quiet_after, chunk_frames, caplog
) -> None:
    quiet_after(40)
    simulation = simulate()
    result = finish(simulation.start(WORDS, 4000, runaway_speech="end", chunk_frames=chunk_frames))
    assert result.talker_finish_reason == "runaway"
    assert result.token_ids == [*WORDS, EOS]
    # A chunk that was sent before the silence was long enough can't be withdrawn.
    assert 40 + KEPT_FRAMES <= len(result.codes) <= 40 + SILENT_FRAMES
    assert len(result.audio) == len(result.codes) * FRAME_SAMPLES - LATENCY_SAMPLES
    assert result.timings.frames == len(result.codes)
    assert len(simulation.called("talker.step")) < 300
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "silence" in record.message and "7 text tokens" in record.message
    simulation.assert_idle()


def test_speech_that_is_to_be_kept_runs_to_its_limit(simulate, quiet_after) -> None:
    quiet_after(40)
    result = finish(simulate().start(WORDS, 900, runaway_speech="keep"))
    assert (len(result.codes), result.talker_finish_reason) == (900, "length")


def test_nothing_is_cut_before_the_talker_has_the_whole_text(simulate, quiet_after) -> None:
    """A text of 300 tokens, of which the talker takes one a frame."""
    quiet_after(10)
    result = finish(simulate().start([5] * 300, 4000, runaway_speech="end", chunk_frames=(1,)))
    assert result.talker_finish_reason == "runaway"
    assert len(result.codes) == 300 + 2 * SILENT_FRAMES - 1
