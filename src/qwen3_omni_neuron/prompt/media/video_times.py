"""Timestamps of a video file's frames, and the choice of those that the model sees."""

import math
from array import array
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.prompt.media.container import Packets

if TYPE_CHECKING:
    from av.video.stream import VideoStream

FRAMES_A_PATCH = 2  # temporal_patch_size: the encoder takes frames in pairs
_UNDATED = -(1 << 63)  # timestamp of a packet without one, as in FFmpeg


@dataclass(frozen=True)
class Sampling:
    """Which frames of a file the model sees.

    nframes: their number, even; None: fps a second, at least min_frames and at most max_frames.
    start_s, end_s: part of the file, in seconds from its first frame; end_s None: to its end.
    """

    fps: float = 2.0
    nframes: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    start_s: Fraction = Fraction(0)
    end_s: Fraction | None = None


@dataclass(frozen=True, eq=False)
class Timeline:
    """Timestamps of the frames of a file, or of a part of it.

    ticks: int64 [frames], ascending; the frames' presentation timestamps.
    shown: int64 [frames]; what the decoder tells of the frame on the screen: its timestamp, or if
    `counted` its number. An empty packet shows the frame before it once more.
    tick: seconds of one tick.
    seconds: length of the video, from the start of the first frame to the end of the last.
    constant: every frame is shown equally long, apart from the rounding of timestamps.
    counted: frames are told by their number, because the decoder's timestamps are of no use.
    start: beginning of the first frame, in seconds of the file's clock.
    keys: int64 [keyframes, 2]; numbers of the packets with keyframes, and their timestamps.
    """

    ticks: NDArray[np.int64]
    shown: NDArray[np.int64]
    tick: Fraction
    seconds: Fraction
    constant: bool
    counted: bool
    start: Fraction
    keys: NDArray[np.int64] | None = None

    def by_count(self) -> "Timeline":
        """Return the same length with equally long frames, numbered in display order."""
        total = len(self.ticks)
        pictures = np.concatenate(([0], np.cumsum(np.diff(self.shown) > 0)))
        tick = self.seconds / total
        ticks = np.arange(total)
        return replace(self, ticks=ticks, shown=pictures, tick=tick, constant=True, counted=True)

    def part(self, start_s: Fraction, end_s: Fraction | None) -> "Timeline":
        """Return the part from start_s, below `seconds`, to end_s.

        At a constant rate these are the frames that begin from start_s to end_s, both included, as
        in qwen-vl-utils; else also the frame on the screen at start_s.
        """
        if not start_s and end_s is None:
            return self
        total = len(self.ticks)
        until = self.seconds if end_s is None else min(end_s, self.seconds)
        if self.constant:
            a_second = total / self.seconds
            last = min(math.floor(until * a_second), total - 1)
            first = min(math.ceil(start_s * a_second), last)
            begin = first / a_second
            seconds = (last - first + 1) / a_second
        else:
            ticks = [self.ticks[0] + math.floor(s / self.tick) for s in (start_s, until)]
            first, last = (int(i) - 1 for i in np.searchsorted(self.ticks, ticks, side="right"))
            begin, seconds = start_s, until - start_s
        kept = slice(first, last + 1)
        ticks = self.ticks[kept].copy()
        if not self.constant:  # the first frame may have begun earlier
            ticks[0] = self.ticks[0] + math.floor(begin / self.tick)
        start = self.start + begin
        return replace(self, ticks=ticks, shown=self.shown[kept], seconds=seconds, start=start)

    def packet_before(self, tick: int) -> int:
        """Return the number of the packet from which on packets are decoded to see a frame."""
        if self.counted or self.keys is None:
            return 0
        before = self.keys[self.keys[:, 1] <= tick, 0]
        return int(before[-1]) if len(before) else 0


def read_timeline(packets: Packets, stream: "VideoStream", fps: float) -> Timeline:
    """Read a stream's timestamps from a file's packets, undecoded. fps: rate if the file has none.

    It ends where timestamps begin anew, as in files that are joined.
    """
    tick = stream.time_base or Fraction(1)
    # A file may have millions of packets, each of which takes 18 bytes here.
    pts, durations, filled, keys = array("q"), array("q"), bytearray(), bytearray()
    for packet in packets:
        if packets.restarts or (not packet.size and packet.pts is None):
            continue
        pts.append(_UNDATED if packet.pts is None else packet.pts)
        durations.append(packet.duration or 0)
        filled.append(packet.size > 0)
        keys.append(packet.is_keyframe)
    rate = stream.average_rate or stream.guessed_rate or Fraction(fps)
    numbers, lengths = (np.frombuffer(x, np.int64) for x in (pts, durations))
    seen, first = (np.frombuffer(x, np.bool_) for x in (filled, keys))
    return _timeline(numbers, lengths, seen, first, stream, tick, rate)


def _timeline(
    pts: NDArray[np.int64],
    durations: NDArray[np.int64],
    filled: NDArray[np.bool_],
    keyframes: NDArray[np.bool_],
    stream: "VideoStream",
    tick: Fraction,
    rate: Fraction,
) -> Timeline:
    total = len(pts)
    order = np.lexsort((filled, durations, pts))
    ticks = pts[order]
    if (pts == _UNDATED).any() or (total > 1 and ticks[0] == ticks[-1]):
        # In a raw stream average_rate is FFmpeg's default of 25, guessed_rate is from the content.
        rate = stream.guessed_rate or rate
        start = Fraction(stream.start_time or 0) * tick
        numbers = np.arange(total)
        return Timeline(numbers, numbers, 1 / rate, total / rate, True, True, start)
    filled = filled[order]
    # An empty packet shows the frame of the last packet before it that is not empty.
    held = np.maximum.accumulate(np.where(filled, np.arange(total), 0))
    seconds, constant = _length(ticks, int(durations[order[-1]]) if total else 0, tick, rate)
    start = int(ticks[0]) * tick if total else Fraction(0)
    (numbers,) = keyframes.nonzero()
    keys = np.stack((numbers, pts[numbers]), 1)
    return Timeline(ticks, ticks[held], tick, seconds, constant, False, start, keys)


def _length(
    ticks: NDArray[np.int64], last_duration: int, tick: Fraction, rate: Fraction
) -> tuple[Fraction, bool]:
    """Return the length in seconds, and whether every frame is shown equally long."""
    total = len(ticks)
    if total < 2:
        return (last_duration * tick if last_duration else 1 / rate), True
    first, last = int(ticks[0]), int(ticks[-1])
    between = Fraction(last - first, total - 1)  # ticks, on average
    # Timestamps are whole ticks, e.g. 0, 33, 67, 100 of a millisecond at 30 frames a second.
    off = np.abs(ticks - first - np.arange(total) * float(between)).max()
    if off > min(1, between / 8):
        return (last - first + (last_duration or between)) * tick, False
    seconds = total * between * tick
    # If the header's rate agrees with the timestamps, it is the value without rounding.
    return (total / rate if abs(total / rate - seconds) <= 2 * tick else seconds), True


def choose_frames(timeline: Timeline, sampling: Sampling) -> list[int]:
    """Return the frames to keep, of Timeline.shown, ascending; a long frame may repeat."""
    total = len(timeline.ticks)
    n = frames_to_sample(total, timeline.seconds, sampling)
    if timeline.constant:
        return [int(timeline.shown[k * total // n]) for k in range(n)]
    length = timeline.seconds / timeline.tick
    moments = [int(timeline.ticks[0]) + int(k * length / n) for k in range(n)]
    shown = np.searchsorted(timeline.ticks, moments, side="right") - 1
    return [int(timeline.shown[i]) for i in shown]


def frames_to_sample(total: int, seconds: Fraction, sampling: Sampling) -> int:
    """Return how many of `total` frames the model sees: an even number, or 1.

    Source: transformers Qwen2VLVideoProcessor.sample_frames, qwen-omni-utils smart_nframes.
    """
    pair = FRAMES_A_PATCH
    if sampling.nframes is not None:
        wanted = sampling.nframes
    else:
        least = math.ceil(sampling.min_frames / pair) * pair
        wanted = min(max(math.floor(seconds * Fraction(sampling.fps)), least), sampling.max_frames)
    return max(1, min(wanted, total) // pair * pair)
