"""Sizes of a reply's audio chunks: how many frames the vocoder decodes in one call.

The first chunk is small, because the player starts with it. A later chunk may take as long as the
player still has audio to play. It takes until its missing frames have arrived, at the pace of the
last frames, plus one call of the vocoder. Example: frames arrive every 20 ms, and the first chunk
is 1 frame (80 ms of audio less the vocoder's look-ahead of 23 ms). The next chunk has 2 frames,
which are decoded before the 57 ms are over; the one after it has 4.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from qwen3_omni_neuron.errors import OptionError

MARGIN = 1.25  # factor on an expected time, for frames that arrive late
# Share of a chunk's duration that the vocoder's call may take. It is below 1, because the call may
# run on the same cores as the stages that make the frames.
VOCODER_SHARE = 0.5


class Pace(NamedTuple):
    """Measurements from which the size of a chunk is chosen, times in seconds.

    pending: frames that have arrived and are not decoded. buffered_s: audio that the player has and
    has not played, None before the first chunk. frame_s: time between two frames, None before it
    was measured. last_call_s: duration of the vocoder's last call. shortest_call_s: shortest call
    by chunk size, for the sizes it has decoded. delay_s: how much longer the last call was than the
    shortest of its size, because other stages used the cores.
    """

    pending: int
    buffered_s: float | None
    frame_s: float | None
    last_call_s: float
    shortest_call_s: Mapping[int, float] = MappingProxyType({})
    delay_s: float = 0.0

    def vocoder_s(self, frames: int) -> float:
        """Return the expected duration of a call with `frames` frames."""
        if frames not in self.shortest_call_s:
            return self.last_call_s
        return self.shortest_call_s[frames] + self.delay_s


class FixedSchedule:
    """Chunk sizes that the caller gave; the last one is used for all later chunks."""

    def __init__(self, sizes: Sequence[int], buckets: Sequence[int]):
        """Raises OptionError for a size that is not in `buckets`, the compiled sizes."""
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
        """Advance to the next size, if there is one."""
        if len(self._sizes) > 1:
            self._sizes.pop(0)


class AdaptiveSchedule:
    """Chunk sizes by the pace: the first as small and the later as large as playback allows.

    buckets: the compiled chunk sizes, ascending. frame_audio_s: audio of one frame. latency_s:
    audio that the first chunk lacks, the vocoder's look-ahead. early: the first chunk does not wait
    until playback can't stop after it.
    """

    def __init__(
        self, buckets: Sequence[int], frame_audio_s: float, latency_s: float, early: bool = False
    ):
        self._buckets, self._early = buckets, early
        self._frame_audio_s, self._latency_s = frame_audio_s, latency_s

    def next_frames(self, pace: Pace) -> int:
        """Return the largest size that is decoded before the player runs out of audio.

        Asked again, with the current pace, until that many frames have arrived.
        """
        # Before the first measurement, frames are assumed to arrive as fast as they are played.
        frame_s = self._frame_audio_s if pace.frame_s is None else pace.frame_s
        if pace.buffered_s is None:
            return self._first_size(frame_s, pace)
        smallest = self._smallest_efficient_size(pace)
        for bucket in reversed(self._buckets):  # mostly the first one fits
            if bucket <= smallest:
                break
            expected_s = max(0, bucket - pace.pending) * frame_s + pace.vocoder_s(bucket)
            if expected_s * MARGIN <= pace.buffered_s:
                return bucket
        return smallest

    def decoded(self) -> None:
        """Do nothing: the next size depends on the pace alone."""

    def _first_size(self, frame_s: float, pace: Pace) -> int:
        """Return the size of the first chunk.

        It is the smallest whose audio lasts until the second chunk is decoded, or larger where more
        frames have arrived already.
        """
        arrived = max((b for b in self._buckets if b <= pace.pending), default=0)
        if self._early:
            return max(self._buckets[0], arrived)
        # The second chunk's frames arrive while the first one is decoded: the longer time counts.
        second = self._smallest_efficient_size(pace)
        wait_s = max(second * frame_s, pace.vocoder_s(second)) * MARGIN
        enough = [b for b in self._buckets if b * self._frame_audio_s - self._latency_s >= wait_s]
        return max(min(enough, default=self._buckets[-1]), arrived)

    def _smallest_efficient_size(self, pace: Pace) -> int:
        """Return the smallest size whose call takes at most VOCODER_SHARE of its audio.

        A call has a high fixed cost. A size that was never measured is assumed to be efficient.
        """
        share = VOCODER_SHARE * self._frame_audio_s
        efficient = (b for b in self._buckets if pace.shortest_call_s.get(b, 0.0) <= b * share)
        return next(efficient, self._buckets[-1])


Schedule = FixedSchedule | AdaptiveSchedule
