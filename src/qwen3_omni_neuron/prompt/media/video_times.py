"""Timestamps of a video file's frames, and the choice of those that the model sees."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

MIN_FRAMES = 4
_FRAMES_A_PATCH = 2  # temporal_patch_size: the encoder takes frames in pairs


@dataclass(frozen=True, eq=False)
class Timeline:
    """Timestamps of a file's frames.

    ticks: int64 [frames], ascending; the frames' presentation timestamps.
    tick: seconds of one tick.
    seconds: length of the video, from the start of the first frame to the end of the last.
    constant: every frame is shown equally long, apart from the rounding of timestamps.
    counted: ticks are 0, 1, 2 ... because the file has no usable timestamps.
    start: timestamp of the first frame, in seconds of the file's clock.
    """

    ticks: NDArray[np.int64]
    tick: Fraction
    seconds: Fraction
    constant: bool
    counted: bool
    start: Fraction

    def by_count(self) -> "Timeline":
        """Return the same length with equally long frames, numbered in display order."""
        total = len(self.ticks)
        tick = self.seconds / total
        return Timeline(np.arange(total), tick, self.seconds, True, True, self.start)


def read_timeline(container: "InputContainer", stream: "VideoStream", fps: float) -> Timeline:
    """Read a stream's timestamps from its packets, undecoded. fps: rate if the file gives none."""
    packets = [
        (packet.pts, packet.duration or 0)
        for packet in container.demux(stream)
        if packet.size and not packet.is_discard
    ]
    times = sorted((pts, duration) for pts, duration in packets if pts is not None)
    rate = stream.average_rate or stream.guessed_rate or Fraction(fps)
    tick = stream.time_base or Fraction(1)
    total = len(packets)
    ticks = np.array([pts for pts, _ in times], np.int64)
    if len(times) < total or (total > 1 and ticks[0] == ticks[-1]):
        # In a raw stream average_rate is FFmpeg's default of 25, guessed_rate is from the content.
        rate = stream.guessed_rate or rate
        start = Fraction(stream.start_time or 0) * tick
        return Timeline(np.arange(total), 1 / rate, total / rate, True, True, start)
    if total < 2:
        seconds = times[0][1] * tick if total and times[0][1] else 1 / rate
        return Timeline(ticks, tick, seconds, True, False, int(ticks.sum()) * tick)
    first, last = int(ticks[0]), int(ticks[-1])
    between = Fraction(last - first, total - 1)  # ticks, on average
    # Timestamps are whole ticks, e.g. 0, 33, 67, 100 of a millisecond at 30 frames a second.
    off = np.abs(ticks - first - np.arange(total) * float(between)).max()
    constant = bool(off <= min(1, between / 8))
    seconds = (last - first + (times[-1][1] or between)) * tick
    if constant:
        seconds = total * between * tick
        # If the header's rate agrees with the timestamps, it is the value without rounding.
        if abs(total / rate - seconds) <= 2 * tick:
            seconds = total / rate
    return Timeline(ticks, tick, seconds, constant, False, first * tick)


def choose_frames(timeline: Timeline, fps: float, max_frames: int) -> list[int]:
    """Return the ticks of the frames to keep, ascending; the tick of a long frame may repeat."""
    ticks, total = timeline.ticks, len(timeline.ticks)
    n = frames_to_sample(total, timeline.seconds, fps, max_frames)
    if timeline.constant:
        return [int(ticks[k * total // n]) for k in range(n)]
    length = timeline.seconds / timeline.tick
    moments = [int(ticks[0]) + int(k * length / n) for k in range(n)]
    shown = np.searchsorted(ticks, moments, side="right") - 1
    return [int(ticks[i]) for i in shown]


def frames_to_sample(total: int, seconds: Fraction, fps: float, max_frames: int) -> int:
    """Return how many of a file's `total` frames the model sees.

    `fps` a second, but at least MIN_FRAMES, at most max_frames and `total`; an even number, or 1.
    Source: transformers Qwen2VLVideoProcessor.sample_frames.
    """
    wanted = max(math.floor(seconds * Fraction(fps)), MIN_FRAMES)
    return max(1, min(wanted, max_frames, total) // _FRAMES_A_PATCH * _FRAMES_A_PATCH)
