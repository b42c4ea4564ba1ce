"""Service curves of one replica: first audio and time a frame, by rows to prefill and requests.

A fleet's day has more engine calls than can be replayed. So one replica is replayed, or measured,
at a few loads once, and a simulation of many replicas takes its times from these curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from testing.replaying.device import Behaviour
from testing.replaying.load import RequestLengths
from testing.replaying.profiles import MEAN_PROMPT_ROWS, StageProfile
from testing.replaying.simulation import replay

CHUNKED_PREFILL = Behaviour("ours, adaptive", chunked_prefill=True)
FEWEST_ROWS = 64
FRAME_S = 0.08
RANKS = np.linspace(0, 1, 11)


@dataclass(frozen=True)
class ServiceCurves:
    """Times of one replica, at each pair of `rows` to prefill and requests `at_once`, ascending.

    first_audio_s: time from getting a slot to the first sample, quantiles at RANKS [rows, at_once,
    rank]. frame_s: time between two frames of a request [rows, at_once]. cores: CPU cores that the
    requests keep busy together [at_once]; 0 where a replica has cores of its own.
    """

    rows: tuple[int, ...]
    at_once: tuple[int, ...]
    first_audio_s: np.ndarray
    frame_s: np.ndarray
    cores: np.ndarray

    def first_audio_of(self, rows: float, at_once: int) -> np.ndarray:
        """Return the quantiles of the time to first audio."""
        return self._between(self.first_audio_s, rows, at_once)

    def frame_of(self, rows: float, at_once: int) -> float:
        """Return the time per frame."""
        return float(self._between(self.frame_s, rows, at_once))

    def cores_of(self, at_once: int) -> float:
        """Return the cores that this many requests keep busy."""
        return float(_weigh(self.cores, self.at_once, at_once))

    def _between(self, table: np.ndarray, rows: float, at_once: int) -> np.ndarray:
        return _weigh(_weigh(table, self.rows, rows), self.at_once, at_once)


def _weigh(table: np.ndarray, points: Sequence[int], at: float) -> np.ndarray:
    """Interpolate along the first axis: constant below the first point, linear beyond the last."""
    if len(points) == 1 or at <= points[0]:
        return table[0]
    last = len(points) - 2
    i = next((i for i in range(last) if at < points[i + 1]), last)
    return table[i] + (at - points[i]) / (points[i + 1] - points[i]) * (table[i + 1] - table[i])


def replayed_curves(
    profile: StageProfile, placement: str, slots: int, load: Sequence[RequestLengths]
) -> ServiceCurves:
    """Replay a load with each number of rows to prefill, at 1, 2, 4, ... requests at once.

    The numbers end at the number of slots, or where speech can't keep up with playback.
    """
    rows = rows_of(profile)
    at_once, first, frame = list[int](), list[list[np.ndarray]](), list[list[float]]()
    while not at_once or (at_once[-1] < slots and min(frame[-1]) < FRAME_S):
        at_once.append(min(2 * at_once[-1], slots) if at_once else 1)
        first.append([])
        frame.append([])
        for count in rows:
            talker_rows = max(count // 2, ASSISTANT_ROWS + 1)
            same = [replace(r, prompt_rows=count, talker_rows=talker_rows) for r in load]
            found = replay(profile, CHUNKED_PREFILL, placement, at_once[-1], same).replies
            timings = [reply.result.timings for reply in found]
            ttfb_s = [t.ttfb_s for t in timings if t.ttfb_s is not None]
            first[-1].append(np.quantile(ttfb_s, RANKS))
            speech_s = sum(t.total_s for t in timings) - sum(ttfb_s)
            frame[-1].append(speech_s / sum(t.frames for t in timings))
    by_rows = np.array(first).swapaxes(0, 1), np.array(frame).T
    return ServiceCurves(rows, tuple(at_once), *by_rows, np.zeros(len(at_once)))


def rows_of(profile: StageProfile) -> tuple[int, ...]:
    """Return the numbers of rows at which a profile's prefill is replayed."""
    sizes = [size for size, _ in profile.stages["thinker_prefill"].seconds]
    if len(sizes) == 1:  # a row costs as much as in the mean prompt of the published load
        return FEWEST_ROWS, MEAN_PROMPT_ROWS // 4, MEAN_PROMPT_ROWS
    return FEWEST_ROWS, *sizes
