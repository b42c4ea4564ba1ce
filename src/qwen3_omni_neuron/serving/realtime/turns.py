"""Turns of a user who talks: samples in, and out where speech begins, pauses and ends.

Time is counted in samples at 16 kHz since the stream began, so that the same sound gives the same
turns however fast it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
KEPT_SILENCE_MS = 200
"""Silence after speech that belongs to the turn; of what follows nothing is given to the model."""
# Below the threshold by so much is silence, as Silero has it; below the least it is in any case.
_HYSTERESIS, _LEAST = 0.15, 0.01


@dataclass(frozen=True)
class TurnSettings:
    """When a turn begins and ends, as OpenAI's server_vad has it.

    idle_timeout_ms: silence after a reply that becomes a turn; None: none does.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None


@dataclass(frozen=True)
class Speech:
    """Next samples of the turn."""

    samples: Samples


@dataclass(frozen=True)
class Started:
    """The user began to speak. at: first sample of the turn, padding included."""

    at: int


@dataclass(frozen=True)
class Paused:
    """The user may have ended: the turn has all its samples if nothing follows."""


@dataclass(frozen=True)
class Stopped:
    """The user ended. at: the sample after the silence that showed it."""

    at: int


@dataclass(frozen=True)
class TimedOut:
    """The user said nothing for too long; the silence has come as Speech. start, end: samples."""

    start: int
    end: int


Outcome = Speech | Started | Paused | Stopped | TimedOut


class TurnDetector:
    """Detector of one stream's turns.

    score: gives the probability of speech of one frame after the other. frame: its samples.
    """

    def __init__(
        self,
        settings: TurnSettings,
        score: Callable[[Samples], float],
        frame: int = 512,
        rate: int = 16000,
        at: int = 0,
    ):
        """at: sample at which the stream stands."""
        self._settings, self._score, self._frame, self._per_ms = (
            settings,
            score,
            frame,
            rate // 1000,
        )
        self.at = at
        self.speaking = False
        self._idle_from: int | None = None
        self._rest = np.zeros(0, np.float32)  # less than a frame
        self._before: list[Samples] = []  # frames before speech: padding, or what is idle
        self._silence: list[Samples] = []  # frames after speech that are not given yet
        self._silent_from: int | None = None
        self._paused = False

    def push(self, samples: Samples) -> list[Outcome]:
        """Take the next samples; return what they tell, in order."""
        found: list[Outcome] = []
        samples = np.concatenate((self._rest, samples))
        whole = len(samples) - len(samples) % self._frame
        for first in range(0, whole, self._frame):
            frame = samples[first : first + self._frame]
            probability = self._score(frame)
            self.at += self._frame
            if self.speaking:
                self._go_on(frame, probability, found)
            else:
                self._wait(frame, probability, found)
        self._rest = samples[whole:]
        return found

    def wait(self, seconds: float) -> None:
        """Count silence from so many seconds on: a reply plays until then."""
        self._idle_from = self.at + round(seconds * 1000 * self._per_ms)

    def end_turn(self) -> Samples:
        """End the turn here, whatever is said. Returns samples of it that were not given yet."""
        rest = np.concatenate([*self._silence, self._rest]) if self.speaking else self._rest[:0]
        self._begin_to_wait()
        return rest

    def _wait(self, frame: Samples, probability: float, found: list[Outcome]) -> None:
        settings = self._settings
        self._before.append(frame)
        if probability >= settings.threshold:
            padding = -(-settings.prefix_padding_ms * self._per_ms // self._frame)
            spoken = self._before[-padding - 1 :]
            found += [Started(self.at - len(spoken) * self._frame), Speech(np.concatenate(spoken))]
            self._before, self.speaking, self._idle_from = [], True, None
            return
        idle, since = settings.idle_timeout_ms, self._idle_from
        longest = max(settings.prefix_padding_ms, idle or 0) * self._per_ms // self._frame + 1
        del self._before[: -longest - 1]
        if idle is not None and since is not None and self.at - since >= idle * self._per_ms:
            found += [Speech(np.concatenate(self._before)), TimedOut(since, self.at)]
            self._begin_to_wait()

    def _go_on(self, frame: Samples, probability: float, found: list[Outcome]) -> None:
        settings = self._settings
        if probability >= settings.threshold:
            self._silent_from = None
        elif self._silent_from is None and probability < max(
            settings.threshold - _HYSTERESIS, _LEAST
        ):
            self._silent_from, self._paused = self.at - self._frame, False
        if self._silent_from is None:
            found.append(Speech(np.concatenate([*self._silence, frame])))
            self._silence = []
            return
        silent = self.at - self._silent_from
        if silent <= KEPT_SILENCE_MS * self._per_ms:
            found.append(Speech(frame))
        else:
            self._silence.append(frame)
            if not self._paused:
                self._paused = True
                found.append(Paused())
        if silent >= settings.silence_duration_ms * self._per_ms:
            found.append(Stopped(self.at))
            self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        self.speaking, self._silent_from, self._paused, self._idle_from = False, None, False, None
        # The silence is the padding of the next turn.
        self._before, self._silence = self._silence, []
