"""The end of a turn by meaning: who judges it, when, and how long an incomplete turn waits."""

import random
from collections.abc import Callable

import numpy as np
import pytest
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
    Paused,
    Started,
    Stopped,
    TurnDetector,
    TurnEvent,
)

RATE, FRAME = 16000, 512
FRAME_MS = 32


def sound(*parts: tuple[float, float]) -> NDArray[np.float32]:
    """Return sound that scores so much for so many ms, each part in turn."""
    frames = [np.full(round(ms / FRAME_MS) * FRAME, score) for score, ms in parts]
    return np.concatenate(frames).astype(np.float32)


def detected(
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

    found = detected(sound((0.9, 960), (0, 9600)), "low", complete, piece)
    assert [type(one) for one in found] == [Started, Paused, Stopped]
    assert found[-1] == Stopped((960 + 224) * RATE // 1000)  # the first frame beyond 200 ms
    assert judged == [(960 + 224) * RATE // 1000]


def test_an_incomplete_turn_waits_as_its_eagerness_says() -> None:
    for eagerness, longest_ms in (("low", 8000), ("medium", 4000), ("auto", 4000), ("high", 2000)):
        found = detected(sound((0.9, 960), (0, 9600)), eagerness, lambda turn: False)
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
    found = detected(samples, "medium", complete)
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
