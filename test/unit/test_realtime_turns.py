"""Turns in sound: when they begin, pause, end and time out, and what of the sound is theirs."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.serving.realtime.turn_detector import (
    FRAME_SAMPLES,
    KEPT_SILENCE_MS,
    Paused,
    SileroVad,
    Speech,
    Started,
    Stopped,
    TimedOut,
    TurnDetector,
    TurnEvent,
    TurnSettings,
)
from train.speech import MEASURING, pink_noise, spoken_clip

RATE = 16000
FRAME_MS = 32


def loudness(frame: NDArray[np.float32]) -> float:
    """Score of a frame: its first sample, so that a test can write scores as sound."""
    return float(frame[0])


def sound(*parts: tuple[float, float]) -> NDArray[np.float32]:
    """Return sound that scores so much for so many ms, each part in turn."""
    frames = [np.full(round(ms / FRAME_MS) * FRAME_SAMPLES, score) for score, ms in parts]
    return np.concatenate(frames).astype(np.float32)


def detected(
    samples: NDArray[np.float32], settings: TurnSettings, sizes: Sequence[int] = (10**9,)
) -> tuple[list[TurnEvent], NDArray[np.float32]]:
    """Return what a detector finds in sound in pieces, and the sound of its turns."""
    detector, found, at, number = TurnDetector(settings, loudness), list[TurnEvent](), 0, 0
    while at < len(samples):
        size = sizes[number % len(sizes)]
        found += detector.push(samples[at : at + size])
        at, number = at + size, number + 1
    spoken = [outcome.samples for outcome in found if isinstance(outcome, Speech)]
    told = [outcome for outcome in found if not isinstance(outcome, Speech)]
    return told, np.concatenate([*spoken, np.zeros(0, np.float32)])


def ms(samples: int) -> float:
    return samples * 1000 / RATE


@pytest.mark.parametrize("sizes", [[10**9], [1], [100, 3, 700], [512], [1600]])
def test_a_turn_is_the_same_however_its_sound_comes(sizes) -> None:
    samples = sound((0, 640), (0.9, 960), (0, 1280))
    told, spoken = detected(samples, TurnSettings(), sizes)
    started, paused, stopped = told
    assert isinstance(started, Started) and isinstance(paused, Paused)
    assert isinstance(stopped, Stopped)
    padding = 320  # whole frames: 300 ms are 9.4 of them
    assert ms(started.at) == 640 - padding
    assert ms(stopped.at) == 640 + 960 + 512
    kept = KEPT_SILENCE_MS // FRAME_MS * FRAME_MS
    assert ms(len(spoken)) == padding + 960 + kept
    assert np.array_equal(spoken, samples[started.at : started.at + len(spoken)])


def test_settings_decide_where_a_turn_starts_and_ends() -> None:
    samples = sound((0, 640), (0.6, 960), (0, 1280))
    assert detected(samples, TurnSettings(threshold=0.7))[0] == []
    told, _ = detected(samples, TurnSettings(prefix_padding_ms=0, silence_duration_ms=1000))
    started, _, stopped = told
    assert isinstance(started, Started) and ms(started.at) == 640
    assert isinstance(stopped, Stopped) and ms(stopped.at) == 640 + 960 + 1024
    told, spoken = detected(samples, TurnSettings(silence_duration_ms=64))
    assert not any(isinstance(one, Paused) for one in told)
    assert ms(len(spoken)) == 320 + 960 + 64


def test_a_pause_is_part_of_a_turn() -> None:
    """Also what was held back of it; a frame between the thresholds neither ends nor goes on."""
    samples = sound((0.9, 320), (0, 384), (0.9, 320), (0.4, 640), (0, 640))
    told, spoken = detected(samples, TurnSettings())
    assert [type(one) for one in told] == [Started, Paused, Paused, Stopped]
    assert ms(told[-1].at) == 320 + 384 + 320 + 640 + 512  # type: ignore[union-attr]
    assert ms(len(spoken)) == 320 + 384 + 320 + 640 + 192


def test_the_end_of_one_turn_is_the_padding_of_the_next() -> None:
    samples = sound((0.9, 320), (0, 512), (0.9, 320), (0, 640))
    told, _ = detected(samples, TurnSettings())
    starts = [ms(one.at) for one in told if isinstance(one, Started)]
    assert starts == [0, 320 + 512 - 320]


def test_silence_after_a_reply_times_out_once() -> None:
    detector = TurnDetector(TurnSettings(idle_timeout_ms=2000), loudness)
    assert not detector.push(sound((0, 4000)))  # nothing was answered yet
    detector.wait(1.0)  # the reply plays for a second
    assert not detector.push(sound((0, 2944)))
    speech, timed_out = detector.push(sound((0, 96)))
    assert isinstance(speech, Speech) and isinstance(timed_out, TimedOut)
    assert ms(timed_out.start) == 4000 + 1000
    assert ms(timed_out.end - timed_out.start) == pytest.approx(2000, abs=FRAME_MS)
    assert ms(len(speech.samples)) >= 2000
    assert not detector.push(sound((0, 8000)))
    detector.wait(0.0)
    assert isinstance(detector.push(sound((0.9, 32)))[0], Started)
    assert [type(one) for one in detector.push(sound((0, 9000)))][-1] is Stopped


def test_end_turn_returns_the_samples_that_were_held_back() -> None:
    detector = TurnDetector(TurnSettings(), loudness)
    detector.push(np.concatenate((sound((0.9, 320), (0, 320)), np.full(100, 0.5, np.float32))))
    assert detector.speaking
    rest = detector.end_turn(np.full(3, 0.5, np.float32))
    assert len(rest) == 4 * FRAME_SAMPLES + 103
    assert not detector.speaking
    assert not len(detector.end_turn(rest[:0]))


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cleared"])
def test_sound_before_a_turns_end_is_in_no_later_turn(ends) -> None:
    """Neither the incomplete frame, nor silence that was held back."""
    detector = TurnDetector(TurnSettings(), loudness)
    first = np.concatenate((sound((0.9, 320), (0.01, 320)), np.full(100, 0.8, np.float32)))
    detector.push(first)
    if ends:
        detector.end_turn(first[:0])
    else:
        detector.clear()
    started, speech = detector.push(sound((0.9, 320)))
    assert isinstance(started, Started) and isinstance(speech, Speech)
    assert started.at == len(first)
    assert np.array_equal(speech.samples, sound((0.9, 320)))


def test_a_turn_that_has_not_begun_is_not_ended() -> None:
    """The padding stays, and the time of silence goes on."""
    detector = TurnDetector(TurnSettings(idle_timeout_ms=1000), loudness)
    detector.wait(0.0)
    quiet = sound((0.01, 320))
    detector.push(quiet)
    assert not len(detector.end_turn(np.full(100, 0.01, np.float32)))
    assert isinstance(detector.push(sound((0, 800)))[-1], TimedOut)


def test_scores_are_those_of_the_models_own_code() -> None:
    from silero_vad import load_silero_vad  # it imports what it can be trained with

    theirs, ours = load_silero_vad(onnx=True), SileroVad()
    clip = spoken_clip("what is two plus six", MEASURING, random.Random(3))
    for first in range(0, len(clip) - FRAME_SAMPLES, FRAME_SAMPLES):
        frame = clip[first : first + FRAME_SAMPLES]
        wanted = float(theirs(torch.from_numpy(frame), RATE))
        assert ours(frame) == pytest.approx(wanted, abs=1e-6)


WORDS = ("say three five", "what is two plus six", "say green", "what is nine minus four")


@pytest.mark.parametrize("below_db", [40.0, 20.0, 10.0])
def test_held_out_speech_in_noise_is_one_turn_each(below_db) -> None:
    """By Silero's model: nothing is cut off, nothing found in noise, the end within a frame or two.

    bench/vad.py has the figures over many more.
    """
    dice = random.Random(int(below_db))
    detector = TurnDetector(TurnSettings(), SileroVad())
    edges, parts, at = [], [], 0
    for words in WORDS:
        clip = spoken_clip(words, MEASURING, dice)
        silence = np.zeros(2 * RATE, np.float32)
        edges.append((at + len(silence), at + len(silence) + len(clip)))
        parts += [silence, clip]
        at += len(silence) + len(clip)
    samples = np.concatenate([*parts, np.zeros(2 * RATE, np.float32)])
    level = float(np.sqrt(np.mean(samples[edges[0][0] : edges[0][1]] ** 2)))
    samples = samples + level * 10 ** (-below_db / 20) * pink_noise(len(samples), dice)
    found = detector.push(samples.astype(np.float32))
    starts = [one.at for one in found if isinstance(one, Started)]
    stops = [one.at for one in found if isinstance(one, Stopped)]
    assert len(starts) == len(stops) == len(WORDS)
    for (first, last), start, stop in zip(edges, starts, stops, strict=True):
        assert first - 0.4 * RATE < start < first + 0.3 * RATE
        assert last - 0.35 * RATE < stop - 0.5 * RATE < last + 0.2 * RATE
