"""Detection of a user's turns: samples in; starts, pauses and ends of speech out.

Time is counted in samples at 16 kHz since the stream began, so that the same sound gives the same
turns however fast it comes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.serving.realtime.turn_models import FRAME_SAMPLES, HEARD_SAMPLES, RATE

Samples = NDArray[np.float32]
KEPT_SILENCE_MS = 200
"""Silence after speech that belongs to the turn; the model does not get the silence after it."""
# Silence: a score _HYSTERESIS below the threshold, as in Silero, or at least a score below _LEAST.
_HYSTERESIS, _LEAST = 0.15, 0.01
_PER_MS = RATE // 1000


@dataclass(frozen=True)
class TurnSettings:
    """Conditions of a turn's start and end, as in OpenAI's server_vad.

    idle_timeout_ms: length of silence after a reply that becomes a turn; None: it never does.
    by_meaning: a pause may end the turn before silence_duration_ms, where the turn is complete.
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
    """The user may have ended: without further speech the turn is complete.

    heard: the turn's last HEARD_SAMPLES, by which the caller is to judge whether the user has said
    all, and to answer with `TurnDetector.judged`; None: nothing is to be judged.
    """

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

    settings: those in use; others may be set at any time. score: function that returns the
    probability of speech in the next frame. Where the settings are by meaning, each pause is judged
    once: the sound after it waits for `judged`, so that the same sound gives the same turns however
    long that takes.
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
        self._silence: list[Samples] = []  # frames after speech that were not returned yet
        self._silent_from: int | None = None
        self._paused = self._judging = False

    def push(self, samples: Samples) -> list[TurnEvent]:
        """Process the next samples, up to a pause that is to be judged; return events in order.

        A pause that was not judged, because that has failed, counts as one inside of a turn.
        """
        self._judging, self._rest = False, np.concatenate((self._rest, samples))
        return self._process([])

    def judged(self, complete: bool) -> list[TurnEvent]:
        """Go on after the pause that was returned last, which ends the turn if it is complete."""
        found: list[TurnEvent] = []
        if complete and self._judging:
            self._stop(found)
        self._judging = False
        return self._process(found)

    def wait(self, seconds: float) -> None:
        """Start the idle timeout after so many seconds, when the reply's playback ends."""
        self._idle_from = self.at + round(seconds * 1000 * _PER_MS)

    def end_turn(self, last: Samples) -> Samples:
        """End the turn, if there is one, after the last samples.

        Returns its samples that were not returned yet.
        """
        self._rest = np.concatenate((self._rest, last))
        if not self.speaking:
            return self._rest[:0]
        rest = np.concatenate([*self._silence, self._rest])
        self.clear()
        return rest

    def clear(self) -> None:
        """Drop all samples that were not returned yet, and the turn, if there is one."""
        self.at += len(self._rest)
        self._rest, self._silence = self._rest[:0], []
        self._begin_to_wait()

    def _process(self, found: list[TurnEvent]) -> list[TurnEvent]:
        """Process whole frames of the samples that were not processed yet.

        Returns what was found; successive samples of the turn are one event.
        """
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
        # The silence is the padding of the next turn.
        self._before, self._silence = self._silence, []
        self._heard.clear()
