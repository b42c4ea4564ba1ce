"""Turns in sound: when they begin, pause, end and time out, and what of the sound is theirs."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.serving.realtime import session_config, turn_detector
from qwen3_omni_neuron.serving.realtime.session_config import (
    SemanticVad,
    ServerVad,
    Voices,
    first_config,
    updated,
)
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
    detector.push(sound((0.01, 320)))
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


def ends_of(
    samples: NDArray[np.float32],
    eagerness: str,
    is_complete: Callable[[NDArray[np.float32]], bool],
    piece: int = 10**9,
) -> list[TurnEvent]:
    settings = SemanticVad.model_validate({"type": "semantic_vad", "eagerness": eagerness}).turns
    detector = TurnDetector(settings, lambda frame: float(frame[0]))
    found = list[TurnEvent]()
    for start in range(0, len(samples), piece):
        found += (more := detector.push(samples[start : start + piece]))
        while more and isinstance(more[-1], Paused):
            heard = more[-1].heard
            assert heard is not None
            found += (more := detector.judged(is_complete(heard)))
    return [one for one in found if isinstance(one, Started | Paused | Stopped)]


@pytest.mark.parametrize("piece", [10**9, 700])
def test_a_complete_turn_ends_at_its_pause(piece) -> None:
    judged: list[int] = []

    def complete(turn: NDArray[np.float32]) -> bool:
        judged.append(len(turn))
        return True

    found = ends_of(sound((0.9, 960), (0, 9600)), "low", complete, piece)
    assert [type(one) for one in found] == [Started, Paused, Stopped]
    assert found[-1] == Stopped((960 + 224) * RATE // 1000)  # the first frame beyond 200 ms
    assert judged == [(960 + 224) * RATE // 1000]


def test_an_incomplete_turn_waits_as_its_eagerness_says() -> None:
    for eagerness, longest_ms in (("low", 8000), ("medium", 4000), ("auto", 4000), ("high", 2000)):
        found = ends_of(sound((0.9, 960), (0, 9600)), eagerness, lambda turn: False)
        assert [type(one) for one in found] == [Started, Paused, Stopped]
        assert isinstance(found[-1], Stopped)
        assert found[-1].at * 1000 / RATE - 960 == pytest.approx(longest_ms, abs=FRAME_MS)


def test_a_turn_is_judged_once_a_pause_by_its_last_8_seconds() -> None:
    answers = iter([False, False, True])
    judged: list[NDArray[np.float32]] = []

    def complete(turn: NDArray[np.float32]) -> bool:
        judged.append(turn)
        return next(answers)

    samples = sound((0.9, 960), (0, 1280), (0.8, 9600), (0, 640), (0.7, 320), (0, 640))
    found = ends_of(samples, "medium", complete)
    assert [type(one) for one in found] == [Started, Paused, Paused, Paused, Stopped]
    ends = [960 + 224, 960 + 1280 + 9600 + 224, 960 + 1280 + 9600 + 640 + 320 + 224]
    for turn, end_ms in zip(judged, ends, strict=True):
        end = end_ms * RATE // 1000
        assert np.array_equal(turn, samples[max(0, end - turn_detector.HEARD_SAMPLES) : end])


def test_a_pause_that_was_not_judged_does_not_end_the_turn() -> None:
    detector = TurnDetector(SemanticVad(type="semantic_vad").turns, lambda frame: float(frame[0]))
    assert isinstance(detector.push(sound((0.9, 960), (0, 960)))[-1], Paused)
    found = detector.push(sound((0, 4000)))
    assert [type(one) for one in found if isinstance(one, Paused | Stopped)] == [Stopped]
    assert detector.judged(True) == []


def test_a_session_without_it_says_that_silence_ends_turns(monkeypatch) -> None:
    monkeypatch.setattr(session_config, "can_detect", lambda: True)
    voices = Voices(())
    first = first_config("m", voices)
    wanted = {"type": "semantic_vad", "eagerness": "low", "interrupt_response": False}
    given = {"audio": {"input": {"turn_detection": wanted}}}
    found = updated(first, given, voices, by_meaning=True).audio.input.turn_detection
    assert found == SemanticVad(type="semantic_vad", eagerness="low", interrupt_response=False)
    found = updated(first, given, voices, by_meaning=False).audio.input.turn_detection
    assert found == ServerVad(type="server_vad", silence_duration_ms=1000, interrupt_response=False)


@pytest.mark.skipif(not turn_detector.can_judge(), reason="pipecat-ai is not installed")
def test_probabilities_are_those_of_the_models_own_features() -> None:
    """The clips are speech, shorter and longer than what it hears, and silence."""
    import onnxruntime
    from transformers import WhisperFeatureExtractor

    from train.speech import MEASURING, spoken_clip

    clip = spoken_clip("what is two plus six", MEASURING, random.Random(3))
    extractor = WhisperFeatureExtractor(chunk_length=8)
    session = onnxruntime.InferenceSession(turn_detector._file(*turn_detector._JUDGE))
    found = []
    for turn in (clip, clip[: len(clip) // 2], np.tile(clip, 9), np.zeros(4000, np.float32)):
        heard = turn[-turn_detector.HEARD_SAMPLES :]
        heard = np.pad(heard, (turn_detector.HEARD_SAMPLES - len(heard), 0))
        features = extractor(
            heard, sampling_rate=RATE, do_normalize=True, return_tensors="np", padding="max_length"
        ).input_features
        expected = session.run(None, {"input_features": features.astype(np.float32)})[0][0, 0]
        found.append(turn_detector.probability(turn))
        assert found[-1] == pytest.approx(float(expected), abs=1e-3)
        assert turn_detector.is_complete(turn) is (found[-1] > 0.5)
    assert max(found) - min(found) > 0.05
