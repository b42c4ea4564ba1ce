"""Estimated playback of a reply's speech by a client that plays it as it arrives."""

import math
import time
from collections.abc import Callable


class Playback:
    """Playback of speech that starts at the first sample and waits where speech is late.

    sent_s: seconds of speech that have arrived. until_s: time at which all of it is played; before
    any has arrived, time at which the player has played earlier speech, -inf if there is none.
    underruns: how often the player had nothing to play; silent_s: total seconds without speech to
    play.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        """now: clock, in seconds."""
        self._now = now
        self.sent_s, self.until_s = 0.0, -math.inf
        self.underruns, self.silent_s = 0, 0.0

    def arrived(self, seconds: float, at_s: float | None = None) -> tuple[float, float]:
        """Add speech that has arrived. Returns when its playback starts and ends.

        at_s: time of arrival, None for now.
        """
        at_s = self._now() if at_s is None else at_s
        if self.sent_s and self.until_s < at_s:
            self.underruns += 1
            self.silent_s += at_s - self.until_s
        start_s = max(self.until_s, at_s)
        self.sent_s += seconds
        self.until_s = start_s + seconds
        return start_s, self.until_s

    @property
    def left_s(self) -> float:
        """Seconds of speech still to be played."""
        return max(0.0, self.until_s - self._now())

    @property
    def heard_s(self) -> float:
        """Seconds of speech played so far."""
        return max(0.0, self.sent_s - self.left_s)
