"""A client's playback of a reply, and the sizes of its audio chunks in frames.

A chunk takes the time of its missing frames and one vocoder call. Example: frames arrive every 20
ms; the first chunk is 1 frame (80 ms less the vocoder's look-ahead of 23 ms). The next has 2
frames, decoded within the 57 ms; the one after it 4.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from qwen3_omni_neuron.errors import OptionError

MARGIN = 1.25  # for late frames
# Share of a chunk's duration for the vocoder's call: stages may share cores.
VOCODER_SHARE = 0.5


class Playback:
    """Playback of speech that starts at the first sample and pauses while speech is late.

    sent_s: seconds that have arrived. until_s: when all are played; before the first, the end of
    earlier speech. underruns, silent_s: number and total seconds of pauses.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.sent_s, self.until_s = 0.0, -math.inf
        self.underruns, self.silent_s = 0, 0.0

    def arrived(self, seconds: float, at_s: float | None = None) -> tuple[float, float]:
        """Add speech that arrived now or `at_s`. Returns its playback's start and end."""
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
        """Seconds still to be played."""
        return max(0.0, self.until_s - self._now())

    @property
    def heard_s(self) -> float:
        """Seconds played."""
        return max(0.0, self.sent_s - self.left_s)


class Pace(NamedTuple):
    """Measurements that determine the next chunk's size; times in seconds.

    pending: frames to decode. buffered_s: the player's remaining audio, None before the first
    chunk. frame_s: frame interval, None if not yet measured. shortest_call_s: by chunk size.
    delay_s: excess of the last call over the shortest of its size: other stages used the cores.
    """

    pending: int
    buffered_s: float | None
    frame_s: float | None
    last_call_s: float
    shortest_call_s: Mapping[int, float] = MappingProxyType({})
    delay_s: float = 0.0

    def vocoder_s(self, frames: int) -> float:
        """Return the expected duration of a call."""
        if frames not in self.shortest_call_s:
            return self.last_call_s
        return self.shortest_call_s[frames] + self.delay_s


class FixedSchedule:
    """Chunk sizes set by the caller; the last one repeats."""

    def __init__(self, sizes: Sequence[int], buckets: Sequence[int]):
        """Raises OptionError for an uncompiled size."""
        unknown = [size for size in sizes if size not in buckets]
        if unknown:
            raise OptionError(
                f"chunk_frames has {unknown[0]}, and the vocoder decodes chunks of "
                f"{', '.join(map(str, buckets))} frames. Choose among these."
            )
        self._sizes = list(sizes)

    def next_frames(self, pace: Pace) -> int:
        """Return the next of the sizes."""
        return self._sizes[0]

    def decoded(self) -> None:
        """Advance to the next size."""
        if len(self._sizes) > 1:
            self._sizes.pop(0)


class AdaptiveSchedule:
    """Chunk sizes by the pace.

    buckets: compiled chunk sizes, ascending. latency_s: audio that the first chunk lacks. early:
    the first chunk does not wait until playback can't stop after it.
    """

    def __init__(
        self, buckets: Sequence[int], frame_audio_s: float, latency_s: float, early: bool = False
    ):
        self._buckets, self._early = buckets, early
        self._frame_audio_s, self._latency_s = frame_audio_s, latency_s

    def next_frames(self, pace: Pace) -> int:
        """Return the largest size decoded before the player runs out of audio."""
        # Before a measurement, assume frames at playback speed.
        frame_s = self._frame_audio_s if pace.frame_s is None else pace.frame_s
        if pace.buffered_s is None:
            return self._first_size(frame_s, pace)
        smallest = self._smallest_efficient_size(pace)
        for bucket in reversed(self._buckets):
            if bucket <= smallest:
                break
            expected_s = max(0, bucket - pace.pending) * frame_s + pace.vocoder_s(bucket)
            if expected_s * MARGIN <= pace.buffered_s:
                return bucket
        return smallest

    def decoded(self) -> None:
        """Do nothing."""

    def _first_size(self, frame_s: float, pace: Pace) -> int:
        """Return the smallest size whose audio lasts until the second chunk, or all frames."""
        arrived = max((b for b in self._buckets if b <= pace.pending), default=0)
        if self._early:
            return max(self._buckets[0], arrived)
        # Frames arrive during the call: the longer time counts.
        second = self._smallest_efficient_size(pace)
        wait_s = max(second * frame_s, pace.vocoder_s(second)) * MARGIN
        enough = [b for b in self._buckets if b * self._frame_audio_s - self._latency_s >= wait_s]
        return max(min(enough, default=self._buckets[-1]), arrived)

    def _smallest_efficient_size(self, pace: Pace) -> int:
        share = VOCODER_SHARE * self._frame_audio_s
        efficient = (b for b in self._buckets if pace.shortest_call_s.get(b, 0.0) <= b * share)
        return next(efficient, self._buckets[-1])


Schedule = FixedSchedule | AdaptiveSchedule
