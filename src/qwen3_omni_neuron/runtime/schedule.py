"""How many frames the vocoder takes at a time: few at first, then as many as the player can wait.

A player starts at the first sample. What it has not played yet is what the next chunk may take:
frames that are still to come, times their pace, plus one call of the vocoder. So with frames that
come in 20 ms and a first chunk of 1 (80 ms of sound less the vocoder's 23 ms of look-ahead), the
next chunk has 2 frames, which are there before the 57 ms are over; the one after that has 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qwen3_omni_neuron.errors import OptionError

MARGIN = 1.25  # over the expected time, for frames that come late
# Of a chunk's sound, that the vocoder's call may take: it may have its cores in common with the
# stages that make the frames.
VOCODER_SHARE = 0.5


@dataclass(frozen=True)
class Pace:
    """What is known when a chunk is chosen, in seconds.

    pending: frames that are there. buffered_s: sound that the player has and has not played, None
    before the first chunk. frame_s: time a frame takes, None before it was ever measured.
    call_s: what the vocoder took for its last call. own_s: the least it ever took, by chunk size,
    for those it has decoded. wait_s: by how much its last call was above that, for want of cores.
    """

    pending: int
    buffered_s: float | None
    frame_s: float | None
    call_s: float
    own_s: Mapping[int, float] = field(default_factory=dict)
    wait_s: float = 0.0

    def vocoder_s(self, frames: int) -> float:
        """What a chunk of so many frames is expected to take."""
        return self.own_s[frames] + self.wait_s if frames in self.own_s else self.call_s


class Schedule(Protocol):
    """Says when the vocoder is to decode how much."""

    def next_frames(self, pace: Pace) -> int:
        """How many frames the next chunk has, a compiled chunk size; asked until they are there."""
        ...

    def decoded(self) -> None:
        """The chunk was decoded."""
        ...


class FixedSchedule:
    """Chunk sizes as they were asked for, the last one for ever.

    Raises OptionError for a size that is none of `buckets`, the compiled ones.
    """

    def __init__(self, sizes: Sequence[int], buckets: Sequence[int]):
        unknown = [size for size in sizes if size not in buckets]
        if unknown:
            raise OptionError(
                f"chunk_frames has {unknown[0]}, and the vocoder decodes chunks of "
                f"{', '.join(map(str, buckets))} frames. Choose among these."
            )
        self._sizes = list(sizes)

    def next_frames(self, pace: Pace) -> int:
        return self._sizes[0]

    def decoded(self) -> None:
        if len(self._sizes) > 1:
            self._sizes.pop(0)


class AdaptiveSchedule:
    """The first chunk as small, and the later ones as large, as a player can bear.

    buckets: the compiled chunk sizes, ascending. frame_audio_s: sound of one frame. latency_s: by
    how much the first chunk is shorter.
    """

    def __init__(self, buckets: Sequence[int], frame_audio_s: float, latency_s: float):
        self._buckets = buckets
        self._frame_audio_s, self._latency_s = frame_audio_s, latency_s

    def next_frames(self, pace: Pace) -> int:
        # Unmeasured frames are taken to be just as fast as they are played.
        frame_s = self._frame_audio_s if pace.frame_s is None else pace.frame_s
        if pace.buffered_s is None:
            return self._first(frame_s, pace)
        chosen = self._least(pace)
        for bucket in self._buckets:
            expected_s = max(0, bucket - pace.pending) * frame_s + pace.vocoder_s(bucket)
            if expected_s * MARGIN <= pace.buffered_s:
                chosen = max(chosen, bucket)
        return chosen

    def decoded(self) -> None:
        """Nothing to count: the pace says it all."""

    def _least(self, pace: Pace) -> int:
        """The smallest chunk that pays: a call costs much however few its frames are. What was
        never measured is taken to pay."""
        share = VOCODER_SHARE * self._frame_audio_s
        paying = (b for b in self._buckets if pace.own_s.get(b, 0.0) <= b * share)
        return next(paying, self._buckets[-1])

    def _first(self, frame_s: float, pace: Pace) -> int:
        """The fewest frames whose sound lasts until the smallest next chunk is there; more where
        more are there already."""
        # Its frames come while this one is decoded: the longer of the two is what it waits for.
        least = self._least(pace)
        wait_s = max(least * frame_s, pace.vocoder_s(least)) * MARGIN
        enough = [b for b in self._buckets if b * self._frame_audio_s - self._latency_s >= wait_s]
        there = [b for b in self._buckets if b <= pace.pending]
        return max(min(enough, default=self._buckets[-1]), max(there, default=0))
