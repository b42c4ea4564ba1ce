"""Detection of runaway speech, which continues after all words.

In about 1 of 300 replies of Qwen3 talkers (sglang-omni #1179), near-silence or a sound feeds
itself: the end code's probability drops to 1e-14. After the whole text, while the end is unlikely,
long silence, a cycle of codes, or more frames than words need can't be speech.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.sampling import Ids, SamplingParams

LIKELY_END = 0.01  # speech then ends within a few seconds
SILENT_POWER = 1e-5  # mean square of a frame's samples: -50 dBFS
SILENT_FRAMES = 24  # 1.92 s
PAUSE_FRAMES = 25  # added per pause in the text, up to MOST_PAUSES
MOST_PAUSES = 4
KEPT_FRAMES = 2  # a sound's decay
CYCLE_FRAMES = 48  # 3.84 s, first period included
LONGEST_PERIOD = 16  # repeated at least twice
LOST = 4  # count lost by one frame outside the cycle
# Frames a text token. Released talkers take 3 to 4; 10 cut last words, 15 not (vllm-omni #6215).
SLOW, QUICK = 15.0, 2.0
PAUSES_OF_ANY_TEXT = 25  # added to its tokens
CEILING = 1.5
LEAST_TOKENS = 4  # shorter replies' pace does not count
_PAUSE = re.compile(r"(?:…|\.\.\.)|\n\s*\n")


@dataclass
class SpokenPace:
    """Pace of the replies to one caller.

    slowest: most frames per text token in replies of LEAST_TOKENS or more. The pipeline locks it.
    """

    slowest: float | None = None

    def add(self, tokens: int, frames: int) -> None:
        """Record a reply whose speech the talker ended."""
        if tokens >= LEAST_TOKENS:
            self.slowest = max(self.slowest or 0.0, frames / tokens)

    def longest_frames(self, tokens: int) -> float:
        """Return the most frames of a text: at half the slowest pace, since digits are tokens."""
        slow = SLOW if self.slowest is None else 2 * self.slowest
        return PAUSES_OF_ANY_TEXT + slow * tokens

    def shortest_frames(self, tokens: int) -> float:
        """Return the number of frames before which words must still follow."""
        return QUICK * tokens if self.slowest is None else self.slowest / 2 * tokens


class Runaway(NamedTuple):
    """Runaway speech. kept: number of first frames to keep."""

    why: str
    kept: int


class RunawayGuard:
    """Detector of runaway speech, frame by frame after the whole text was consumed.

    first: index of its first frame. frames: number of all.
    """

    def __init__(self, first: int, tokens: int, text: str, pace: SpokenPace):
        self.frames = self._last_sound = self._silent_from = first
        self._longest = CEILING * pace.longest_frames(tokens)
        self._shortest = pace.shortest_frames(tokens)
        pauses = min(len(_PAUSE.findall(text)), MOST_PAUSES)
        self._most_silent = SILENT_FRAMES + PAUSE_FRAMES * pauses
        # The last frames, latest first; repeated frames by period.
        self._codes = np.full(LONGEST_PERIOD, -1, np.int64)
        self._repeated = np.zeros(LONGEST_PERIOD, np.int64)

    def hear(self, power: float, code0: int, end_probability: float) -> Runaway | None:
        """Process the next frame. Returns runaway speech, or None.

        power: mean square of its samples. end_probability: 1 until the whole text was consumed.
        """
        self.frames += 1
        if power >= SILENT_POWER:
            self._last_sound = self._silent_from = self.frames
        silent = self.frames - self._last_sound
        repeated = self._codes == code0
        self._repeated = np.where(repeated, self._repeated + 1, self._repeated - LOST).clip(0)
        self._codes = np.concatenate(([code0], self._codes[:-1]))
        if end_probability >= LIKELY_END:
            self._silent_from = self.frames
        if end_probability >= LIKELY_END or silent > LONGEST_PERIOD:
            self._repeated[:] = 0  # codes of silence repeat, too
        if end_probability >= LIKELY_END:
            return None
        more = SILENT_FRAMES if self._last_sound < self._shortest else 0
        if self.frames - self._silent_from >= self._most_silent + more:
            return self._end("silence", self.frames)
        cycles = _PERIODS[self._repeated >= CYCLE_FRAMES - _PERIODS]
        if len(cycles):
            repeats = CYCLE_FRAMES - int(cycles[0])
            return self._end("a cycle of codes", self.frames - repeats)
        if self.frames > self._longest:
            return self._end("more frames than the words can take", self.frames)
        return None

    def _end(self, why: str, kept: int) -> Runaway:
        return Runaway(why, min(kept, self._last_sound + KEPT_FRAMES))


_PERIODS: NDArray[np.int64] = np.arange(1, LONGEST_PERIOD + 1)


def end_probability(logits: Tensor, params: SamplingParams, allowed: Ids, end_id: int) -> float:
    """Return the end code's probability in a frame that continues.

    logits: [1, vocab] of code 0. Ignores top-k and top-p, which make an unlikely end impossible.
    """
    if not params.do_sample:
        return 0.0
    scores = logits.float().numpy()[0] / params.temperature
    end, scores = scores[end_id], scores.take(allowed)
    largest = scores.max()
    return float(np.exp(end - largest) / np.exp(scores - largest).sum())
