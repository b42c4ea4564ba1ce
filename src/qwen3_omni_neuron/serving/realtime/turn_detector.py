"""Detection of a user's turns: samples in; starts, pauses and ends of speech out.

Silero's model gives the probability of speech in 32 ms; Smart Turn v3.2 judges whether a pausing
user has finished. Time is counted in samples: the same sound gives the same turns.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings, log_mel

Samples = NDArray[np.float32]
RATE = 16000
FRAME_SAMPLES = 512
HEARD_SAMPLES = 8 * RATE
"""Samples of a turn's end, by which it is judged."""
INSTALL = "pip install 'qwen3-omni-neuron[realtime]'"
KEPT_SILENCE_MS = 200
"""Silence after speech that belongs to the turn; later silence is dropped."""
# Silence: a score _HYSTERESIS below the threshold, as in Silero, or at least below _LEAST.
_HYSTERESIS, _LEAST = 0.15, 0.01
_PER_MS = RATE // 1000
_CONTEXT_SAMPLES = 64  # samples of the previous frame that Silero's model gets again
_COMPLETE = 0.5  # least probability of a complete turn
_VARIANCE = 1e-7  # avoids division by zero in silence
# Packages, and their model files.
_VAD = "silero_vad", "data/silero_vad.onnx"
_JUDGE = "pipecat", "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"


@dataclass(frozen=True)
class TurnSettings:
    """Conditions of a turn's start and end, as in OpenAI's server_vad.

    by_meaning: a pause may end a complete turn before silence_duration_ms.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    by_meaning: bool = False


@dataclass(frozen=True)
class Speech:
    """Next samples of the turn."""

    samples: Samples


@dataclass(frozen=True)
class Started:
    """The user began to speak. at: first sample of the turn, including padding."""

    at: int


@dataclass(frozen=True)
class Paused:
    """The user may have ended. heard: last HEARD_SAMPLES to judge; None: don't."""

    heard: Samples | None = None


@dataclass(frozen=True)
class Stopped:
    """The user ended. at: first sample after the silence that ended the turn."""

    at: int


@dataclass(frozen=True)
class TimedOut:
    """The user was silent for too long; Speech has the silence. start, end: its samples."""

    start: int
    end: int


TurnEvent = Speech | Started | Paused | Stopped | TimedOut


class TurnDetector:
    """Detector of one stream's turns.

    settings: may be replaced at any time. score: returns the next frame's probability of speech. By
    meaning, each pause is judged once; later sound waits for `judged`.
    """

    def __init__(self, settings: TurnSettings, score: Callable[[Samples], float], at: int = 0):
        """at: number of samples of the stream so far."""
        self.settings, self._score, self.at = settings, score, at
        # The turn's last frames.
        self._heard: deque[Samples] = deque(maxlen=HEARD_SAMPLES // FRAME_SAMPLES)
        self.speaking = False
        self._idle_from: int | None = None
        self._rest = np.zeros(0, np.float32)  # samples of an incomplete frame
        self._before: list[Samples] = []  # frames before speech: padding, or idle silence
        self._silence: list[Samples] = []  # frames after speech, not yet returned
        self._silent_from: int | None = None
        self._paused = self._judging = False

    def push(self, samples: Samples) -> list[TurnEvent]:
        """Process samples up to a pause to judge; return events in order."""
        self._judging, self._rest = False, np.concatenate((self._rest, samples))
        return self._process([])

    def judged(self, complete: bool) -> list[TurnEvent]:
        """Resume after the last returned pause, which ends a complete turn."""
        found: list[TurnEvent] = []
        if complete and self._judging:
            self._stop(found)
        self._judging = False
        return self._process(found)

    def wait(self, seconds: float) -> None:
        """Start the idle timeout after `seconds`, when the reply's playback ends."""
        self._idle_from = self.at + round(seconds * 1000 * _PER_MS)

    def end_turn(self, last: Samples) -> Samples:
        """End any turn after the last samples; return its rest."""
        self._rest = np.concatenate((self._rest, last))
        if not self.speaking:
            return self._rest[:0]
        rest = np.concatenate([*self._silence, self._rest])
        self.clear()
        return rest

    def clear(self) -> None:
        """Drop the turn, and all samples not yet returned."""
        self.at += len(self._rest)
        self._rest, self._silence = self._rest[:0], []
        self._begin_to_wait()

    def _process(self, found: list[TurnEvent]) -> list[TurnEvent]:
        """Process whole frames; return events, joining successive samples."""
        first, last = 0, len(self._rest) - FRAME_SAMPLES
        while first <= last and not self._judging:
            frame = self._rest[first : first + FRAME_SAMPLES]
            first += FRAME_SAMPLES
            probability = self._score(frame)
            self.at += FRAME_SAMPLES
            if self.speaking:
                self._go_on(frame, probability, found)
            else:
                self._wait(frame, probability, found)
        self._rest = self._rest[first:]
        joined: list[TurnEvent] = []
        for kind, events in groupby(found, type):
            if kind is Speech:
                parts = [event.samples for event in events if isinstance(event, Speech)]
                joined.append(Speech(np.concatenate(parts)))
            else:
                joined += events
        return joined

    def _wait(self, frame: Samples, probability: float, found: list[TurnEvent]) -> None:
        settings = self.settings
        self._before.append(frame)
        if probability >= settings.threshold:
            padding = -(-settings.prefix_padding_ms * _PER_MS // FRAME_SAMPLES)
            spoken = self._before[-padding - 1 :]
            found += [
                Started(self.at - len(spoken) * FRAME_SAMPLES),
                Speech(np.concatenate(spoken)),
            ]
            self._heard.extend(spoken)
            self._before, self.speaking, self._idle_from = [], True, None
            return
        idle, since = settings.idle_timeout_ms, self._idle_from
        longest = max(settings.prefix_padding_ms, idle or 0) * _PER_MS // FRAME_SAMPLES + 1
        del self._before[: -longest - 1]
        if idle is not None and since is not None and self.at - since >= idle * _PER_MS:
            found += [Speech(np.concatenate(self._before)), TimedOut(since, self.at)]
            self._begin_to_wait()

    def _go_on(self, frame: Samples, probability: float, found: list[TurnEvent]) -> None:
        settings = self.settings
        self._heard.append(frame)
        if probability >= settings.threshold:
            self._silent_from = None
        elif self._silent_from is None and probability < max(
            settings.threshold - _HYSTERESIS, _LEAST
        ):
            self._silent_from, self._paused = self.at - FRAME_SAMPLES, False
        if self._silent_from is None:
            found.append(Speech(np.concatenate([*self._silence, frame])))
            self._silence = []
            return
        silent = self.at - self._silent_from
        if silent <= KEPT_SILENCE_MS * _PER_MS:
            found.append(Speech(frame))
        else:
            self._silence.append(frame)
            if not self._paused:
                self._paused, self._judging = True, settings.by_meaning
                found.append(Paused(np.concatenate(self._heard) if settings.by_meaning else None))
        if silent >= settings.silence_duration_ms * _PER_MS:
            self._stop(found)

    def _stop(self, found: list[TurnEvent]) -> None:
        found.append(Stopped(self.at))
        self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        self.speaking, self._silent_from, self._idle_from = False, None, None
        self._paused = self._judging = False
        # The silence pads the next turn.
        self._before, self._silence = self._silence, []
        self._heard.clear()


def can_detect() -> bool:
    """Return whether the packages of the extra `realtime` are installed."""
    return find_spec("onnxruntime") is not None and _file(*_VAD) is not None


def can_judge() -> bool:
    """Return whether the packages of the extra `smart-turn` are installed."""
    return find_spec("onnxruntime") is not None and _file(*_JUDGE) is not None


def judges(omni: Qwen3Omni) -> bool:
    """Return whether a turn's end may be judged by meaning with this model."""
    return can_judge() and not omni.turns_by_silence


class SileroVad:
    """Voice activity model, with one stream's state.

    Source: silero-vad utils_vad.py, OnnxWrapper.
    """

    def __init__(self) -> None:
        self._model = _loaded(_file(*_VAD))
        self._state = np.zeros((2, 1, 128), np.float32)
        self._frame = np.zeros((1, _CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)

    def __call__(self, frame: Samples) -> float:
        """Return the probability of speech in a frame, float32 [FRAME_SAMPLES] at RATE."""
        self._frame[0, :_CONTEXT_SAMPLES] = self._frame[0, -_CONTEXT_SAMPLES:]
        self._frame[0, _CONTEXT_SAMPLES:] = frame
        given = {"input": self._frame, "state": self._state, "sr": np.array(RATE, np.int64)}
        output, self._state = self._model.run(None, given)
        return float(output[0, 0])


def probability(turn: Samples) -> float:
    """Return the probability that a turn is complete, in about 0.1 s of one core.

    turn: float32 [samples] at RATE; the last HEARD_SAMPLES count.
    Source: the class of pipecat-ai that runs the same file.
    """
    heard = turn[-HEARD_SAMPLES:]
    heard = np.concatenate((np.zeros(HEARD_SAMPLES - len(heard), np.float32), heard))
    heard = (heard - heard.mean()) / np.sqrt(heard.var() + np.float32(_VARIANCE))
    features = log_mel(heard, _mel_settings()).numpy()[None]  # [1, 80, 800]
    (output,) = load_judge().run(None, {"input_features": features})
    return float(output[0, 0])


def is_complete(turn: Samples) -> bool:
    """Return whether a turn is probably complete; see `probability`."""
    return probability(turn) > _COMPLETE


@functools.cache
def _mel_settings() -> MelSettings:
    return MelSettings.of({"feature_size": 80, "sampling_rate": RATE})


def load_judge() -> Any:
    """Load Smart Turn's model, once for all streams."""
    return _loaded(_file(*_JUDGE))


def _file(package: str, name: str) -> Path | None:
    """Return a package's file without an import, which would load training dependencies."""
    found = find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


@functools.cache
def _loaded(file: Path | None) -> Any:
    """Load a model, once for all streams. Its `run` is thread-safe."""
    import onnxruntime

    assert file is not None, "the package is installed"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
