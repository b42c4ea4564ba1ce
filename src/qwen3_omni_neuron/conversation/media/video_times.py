"""When a video file's frames are shown, and which of them the model sees."""

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
_TOGETHER = 2  # the encoder takes frames by two: temporal_patch_size


@dataclass(frozen=True, eq=False)
class Timeline:
    """When a file's frames are shown.

    ticks: int64 [frames], ascending; the frames' presentation timestamps, or 0, 1, 2 ... in a
    file that lacks them (`counted`).
    tick: seconds of one tick.
    seconds: from when the first frame is shown until the last one no longer is.
    constant: every frame is shown equally long, but for what the timestamps are rounded by.
    start: when the first frame is shown, in seconds of the file's clock.
    """

    ticks: NDArray[np.int64]
    tick: Fraction
    seconds: Fraction
    constant: bool
    counted: bool
    start: Fraction

    def by_count(self) -> "Timeline":
        """The same length, with its frames equally long, numbered in the order they are shown."""
        total = len(self.ticks)
        tick = self.seconds / total
        return Timeline(np.arange(total), tick, self.seconds, True, True, self.start)


def read_timeline(container: "InputContainer", stream: "VideoStream", fps: float) -> Timeline:
    """Read from the packets: much less work than decoding them. fps: where the file names none."""
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
        # A bare stream of pictures: average_rate is FFmpeg's 25, the guess what the pictures say.
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
        # The header's rate is that without the rounding, where it is the same one.
        if abs(total / rate - seconds) <= 2 * tick:
            seconds = total / rate
    return Timeline(ticks, tick, seconds, constant, False, first * tick)


def choose_frames(timeline: Timeline, fps: float, max_frames: int) -> list[int]:
    """The ticks of the frames to keep, ascending; one of them more than once if it lasts long."""
    ticks, total = timeline.ticks, len(timeline.ticks)
    n = frames_to_sample(total, timeline.seconds, fps, max_frames)
    if timeline.constant:
        return [int(ticks[k * total // n]) for k in range(n)]
    length = timeline.seconds / timeline.tick
    moments = [int(ticks[0]) + int(k * length / n) for k in range(n)]
    shown = np.searchsorted(ticks, moments, side="right") - 1
    return [int(ticks[i]) for i in shown]


def frames_to_sample(total: int, seconds: Fraction, fps: float, max_frames: int) -> int:
    """How many of a file's `total` frames are seen: `fps` a second of it, but at least MIN_FRAMES,
    at most max_frames and as many as there are, an even number unless there is only one.

    Source: transformers Qwen2VLVideoProcessor.sample_frames.
    """
    wanted = max(math.floor(seconds * Fraction(fps)), MIN_FRAMES)
    return max(1, min(wanted, max_frames, total) // _TOGETHER * _TOGETHER)
