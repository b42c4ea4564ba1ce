"""Video file -> the frames that the model sees, their rate, and the audio.

A file is read for timestamps without decoding, then for frames, then for audio.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import VideoError
from qwen3_omni_neuron.prompt.media.audio import Waveform, at_one_rate, load_waveform
from qwen3_omni_neuron.prompt.media.container import (
    Packets,
    chosen_stream,
    frame_samples,
    no_decoder,
    opened,
    promised_s,
)
from qwen3_omni_neuron.prompt.media.fields import Source, Warn, ignore, name_of, read_format

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream
FRAMES_A_PATCH = 2  # temporal_patch_size
_UNDATED = -(1 << 63)  # a packet's missing timestamp, as in FFmpeg
_FILLED, _KEY, _SHOWN = 1, 2, 4  # flags of a packet: has bytes, is a keyframe, is shown


@dataclass(frozen=True)
class Sampling:
    """Frames of a file that the model sees.

    nframes: their number, even; None: fps per second, from min_frames to max_frames. start_s,
    end_s: part of the file; end_s None: to its end.
    """

    fps: float = 2.0
    nframes: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    start_s: Fraction = Fraction(0)
    end_s: Fraction | None = None


@dataclass(frozen=True, eq=False)
class Timeline:
    """Timestamps of the frames of a file or its part.

    ticks: int64 [frames], ascending presentation timestamps. shown: int64 [frames], timestamp of
    the picture on the screen, or its number if `counted`. packets: int64 [frames]. tick: in
    seconds. constant: all frames last equally long. start: in seconds of the file's clock. keys:
    int64 [keyframes, 2], packets' numbers and timestamps.
    """

    ticks: NDArray[np.int64]
    shown: NDArray[np.int64]
    packets: NDArray[np.int64]
    tick: Fraction
    seconds: Fraction
    constant: bool
    counted: bool
    start: Fraction
    keys: NDArray[np.int64] | None = None

    def by_count(self) -> "Timeline":
        """Return the same length in equal frames, numbered in display order."""
        total = len(self.ticks)
        pictures = np.concatenate(([0], np.cumsum(np.diff(self.shown) > 0)))
        tick = self.seconds / total
        ticks = np.arange(total)
        return replace(self, ticks=ticks, shown=pictures, tick=tick, constant=True, counted=True)

    def part(self, start_s: Fraction, end_s: Fraction | None) -> "Timeline":
        """Return the part from start_s, below `seconds`, to end_s.

        At a variable rate the frame on the screen at start_s is included; else frames begin in the
        part, as in qwen-vl-utils.
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
        shown, packets, start = self.shown[kept], self.packets[kept], self.start + begin
        return replace(
            self, ticks=ticks, shown=shown, packets=packets, seconds=seconds, start=start
        )

    def first_packet(self) -> int:
        """Return the first packet to decode."""
        if self.counted or self.keys is None:
            return 0
        numbers, ticks = self.keys.T
        before = numbers[(numbers <= self.packets[0]) & (ticks <= self.shown[0])]
        return int(before[-1]) if len(before) else 0


def read_timeline(packets: Packets, stream: "VideoStream", fps: float) -> Timeline:
    """Read timestamps until they restart. fps: rate if the file has none.

    Packets left out by an edit list are decoded, because others need them, but not shown.
    """
    tick = stream.time_base or Fraction(1)
    pts, durations, flags = array("q"), array("q"), bytearray()
    for packet in packets:
        if packets.restarts or (not packet.size and packet.pts is None):
            continue
        pts.append(_UNDATED if packet.pts is None else packet.pts)
        durations.append(packet.duration or 0)
        shown = 0 if packet.is_discard else _SHOWN
        flags.append((_FILLED if packet.size else 0) | (_KEY if packet.is_keyframe else 0) | shown)
    rate = stream.average_rate or stream.guessed_rate or Fraction(fps)
    numbers, lengths = (np.frombuffer(x, np.int64) for x in (pts, durations))
    return _timeline(numbers, lengths, np.frombuffer(flags, np.uint8), stream, tick, rate)


def _timeline(
    pts: NDArray[np.int64],
    durations: NDArray[np.int64],
    flags: NDArray[np.uint8],
    stream: "VideoStream",
    tick: Fraction,
    rate: Fraction,
) -> Timeline:
    (keys,) = (flags & _KEY).nonzero()
    keyframes = np.stack((keys, pts[keys]), 1)
    (packets,) = (flags & _SHOWN).nonzero()
    packets = packets[np.lexsort((flags[packets] & _FILLED, durations[packets], pts[packets]))]
    total, ticks = len(packets), pts[packets]
    if total and (ticks[0] == _UNDATED or (total > 1 and ticks[0] == ticks[-1])):
        # A raw stream's average_rate is FFmpeg's default of 25; guessed_rate is from the content.
        rate = stream.guessed_rate or rate
        start = Fraction(stream.start_time or 0) * tick
        numbers = np.arange(total)
        return Timeline(numbers, numbers, numbers, 1 / rate, total / rate, True, True, start)
    # An empty packet shows the last filled packet's frame.
    filled = (flags[packets] & _FILLED) > 0
    held = np.maximum.accumulate(np.where(filled, np.arange(total), 0))
    seconds, constant = _length(ticks, int(durations[packets[-1]]) if total else 0, tick, rate)
    start = int(ticks[0]) * tick if total else Fraction(0)
    if not constant and stream.container.format.name.startswith("mov"):
        # An edit list may end while the last frame is shown.
        length = (stream.duration or 0) * tick - start
        seconds = min(seconds, length) if length > int(ticks[-1]) * tick - start else seconds
    return Timeline(
        ticks, ticks[held], packets[held], tick, seconds, constant, False, start, keyframes
    )


def _length(
    ticks: NDArray[np.int64], last_duration: int, tick: Fraction, rate: Fraction
) -> tuple[Fraction, bool]:
    """Return the length in seconds, and whether all frames last equally long."""
    total = len(ticks)
    if total < 2:
        return (last_duration * tick if last_duration else 1 / rate), True
    first, last = int(ticks[0]), int(ticks[-1])
    between = Fraction(last - first, total - 1)
    # Timestamps are whole ticks, e.g. 0, 33, 67, 100 ms at 30 frames per second.
    off = np.abs(ticks - first - np.arange(total) * float(between)).max()
    if off > min(1, between / 8):
        return (last - first + (last_duration or between)) * tick, False
    seconds = total * between * tick
    # A header's rate, if it agrees with the timestamps, is not rounded.
    return (total / rate if abs(total / rate - seconds) <= 2 * tick else seconds), True


def choose_frames(timeline: Timeline, sampling: Sampling) -> list[int]:
    """Return the frames to keep, as Timeline.shown, ascending; a long frame may repeat."""
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


Frames = NDArray[np.uint8]
Fit = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
"""Function (upright frame [height, width, 3]) -> frame to keep; may raise."""
_HOLE = 1.5  # mean distances between frames


@dataclass(frozen=True)
class VideoHeader:
    """Sizes of a file's video and audio, known before decoding.

    frames: number that the model sees. height, width: before rotation. audio_s: 0 if unwanted.
    """

    frames: int
    height: int
    width: int
    seconds: float
    audio_s: float


Check = Callable[[VideoHeader], object]
"""Function of a video's header, called before decoding; may raise."""


@dataclass(frozen=True, eq=False)
class Video:
    """Frames and audio of a video for the model.

    frames: uint8 [n, height, width, 3]. fps: their rate. audio: float32 [samples], mono, from the
    first frame on.
    """

    frames: Frames
    fps: float
    audio: Waveform | None = None


class _DisorderError(Exception):
    """Decoded frames have descending timestamps, as in AVI, which stores none."""


def keep_whole(frame: Frames) -> Frames:
    """Keep a frame unchanged: the default."""
    return frame


def read_video_file(
    source: Source,
    where: str,
    *,
    sampling: Sampling,
    audio_rate: int | None,
    limit_s: float = math.inf,
    check: Check = ignore,
    fit: Fit = keep_whole,
    threads: int = 0,
    warn: Warn = ignore,
) -> Video:
    """Read a file's frames, evenly spread over its length, and its audio if audio_rate is given.

    Frame k of n is frame floor(k * total / n) of the file, as in the reference; at a variable rate
    the frame shown at k / n of the length. Frame k is shown at k / Video.fps seconds.
    limit_s: longest audio. check: called before decoding. fit: called with each upright frame, to
    keep a smaller one. threads: the decoder's; 0: one per core. warn: called for a file that is
    not used whole. Raises VideoError, AudioError and PromptTooLongError.
    """
    read_format(source, where, "video")
    place = f"{where}: {name_of(source)}"
    with opened(source, where, "video") as container:
        stream = _video_stream(container, source, where, threads, warn)
        promised = promised_s(container, stream, source)
        packets = Packets(container, stream)
        whole = read_timeline(packets, stream, sampling.fps)
        if not len(whole.ticks):
            raise VideoError(f"{place} has a video stream without any frame. Export it again.")
        losses = packets.losses(source, where, promised, float(whole.seconds))
        timeline = _part_of(whole, sampling, where)
        chosen = choose_frames(timeline, sampling)
        audio_s = 0.0 if audio_rate is None else _audio_seconds(container, timeline, sampling)
        seconds = float(timeline.seconds)
        check(VideoHeader(len(chosen), stream.height, stream.width, seconds, audio_s))
    if losses:
        warn(f"{place} is incomplete: {losses}. Its {float(whole.seconds):.2f} s are used.")
    try:
        kept = _read_frames(source, where, timeline, chosen, fit, threads)
    except _DisorderError:
        timeline = _part_of(whole.by_count(), sampling, where)
        chosen = choose_frames(timeline, sampling)
        kept = _read_frames(source, where, timeline, chosen, fit, threads)
    if kept.frames is None:
        raise VideoError(f"{place}: no frame of it can be decoded. Export it again.")
    kept.report(place, warn)
    audio = None
    if audio_rate is not None:
        audio = _read_audio(source, where, audio_rate, timeline, sampling, limit_s, warn)
    return Video(kept.frames, float(len(kept.frames) / timeline.seconds), audio)


def _part_of(whole: Timeline, sampling: Sampling, where: str) -> Timeline:
    if sampling.start_s >= whole.seconds:
        raise VideoError(
            f"{where} has video_start {float(sampling.start_s):g}, but the video lasts "
            f"{float(whole.seconds):.2f} s. Give an earlier one."
        )
    part = whole.part(sampling.start_s, sampling.end_s)
    if sampling.nframes is not None and sampling.nframes > len(part.ticks):
        raise VideoError(
            f"{where} has nframes {sampling.nframes}, but only {len(part.ticks)} frames. "
            "Give fewer, or fps."
        )
    return part


def _video_stream(
    container: "InputContainer", source: Source, where: str, threads: int, warn: Warn = ignore
) -> "VideoStream":
    from av.stream import Disposition

    # A song's cover image is a video stream of one frame.
    videos = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    place = f"{where}: {name_of(source)}"
    stream = chosen_stream(videos, place, warn)
    if stream is not None and stream.codec_context is None:
        raise no_decoder(where, source, "video", VideoError)
    if stream is not None:
        stream.thread_type, stream.codec_context.thread_count = "AUTO", threads
        return stream
    if container.streams.audio:
        raise VideoError(
            f'{place} has only sound, no video stream. Send it as an item of type "audio" '
            "(input_audio over HTTP)."
        )
    others = " and ".join(sorted({stream.type for stream in container.streams}))
    raise VideoError(
        f"{place} has no video stream, only {others or 'an empty container'}. Give a video, or "
        "frames."
    )


def _audio_seconds(container: "InputContainer", timeline: Timeline, sampling: Sampling) -> float:
    stream = chosen_stream(container.streams.audio, "", ignore)
    if stream is None:
        return 0.0
    if stream.duration and stream.time_base and sampling.end_s is None:
        return max(0.0, float(stream.duration * stream.time_base - sampling.start_s))
    return float(timeline.seconds)


def _read_frames(
    source: Source, where: str, timeline: Timeline, chosen: list[int], fit: Fit, threads: int
) -> "_KeptFrames":
    """Decode and keep the frame shown at each chosen tick."""
    with opened(source, where, "video") as container:
        stream = _video_stream(container, source, where, threads)
        kept = _KeptFrames(chosen, timeline, fit)
        previous: tuple[int, VideoFrame] | None = None
        latest: int | None = None
        packets = Packets(container, stream)
        for index, frame in enumerate(_decoded(packets, timeline.first_packet())):
            now = index if timeline.counted else frame.pts
            if now is None:
                continue
            if latest is not None and now < latest:
                raise _DisorderError
            latest = now
            while kept.next is not None and now > kept.next:
                kept.add(*(previous or (now, frame)))
            if kept.next is None:
                break
            previous = now, frame
        while previous is not None and kept.next is not None:
            kept.add(*previous)
        kept.failed = packets.failed
    return kept


def _decoded(packets: Packets, first: int = 0) -> Iterator[Any]:
    for number, packet in enumerate(packets):
        # An empty packet repeats the last frame, but would end FFmpeg's stream. A packet without a
        # timestamp is that end.
        if number >= first and (packet.size or packet.pts is None):
            yield from packets.decoded(packet)


def _pixels(frame: "VideoFrame", **size: Any) -> NDArray[Any]:
    """Return a frame's pixels, scaled on one thread: decoders can't start more."""
    import av

    # Earlier versions use one.
    threads: Any = {"threads": 1} if int(av.__version__.partition(".")[0]) >= 17 else {}
    return frame.to_ndarray(format="rgb24", **size, **threads)


def _orientation(frame: "VideoFrame") -> tuple[bool, bool, bool]:
    """Return whether x and y of a frame are swapped, and then whether each is reversed.

    The right-angled orientation nearest to the display matrix: nine integers, whose [0, 1, 3, 4]
    map (x, y) to (a x + c y, b x + d y).
    """
    found: Any = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return False, False, False
    a, b, _, c, d = np.frombuffer(found, np.int32)[:5].tolist()
    swapped = abs(b) + abs(c) > abs(a) + abs(d)
    return (True, c < 0, b < 0) if swapped else (False, a < 0, d < 0)


class _KeptFrames:
    """Chosen frames, upright, fitted, of one size. failed: undecodable packets."""

    def __init__(self, chosen: list[int], timeline: Timeline, fit: Fit):
        self._chosen, self._fit = chosen, fit
        steps = np.diff(timeline.shown)
        self._hole = _HOLE * float(steps.mean()) if len(steps) else math.inf
        self._size: tuple[int, ...] | None = None
        self._other: tuple[int, ...] | None = None
        self._count = self._missing = self.failed = 0
        self.frames: Frames | None = None

    @property
    def next(self) -> int | None:
        return self._chosen[self._count] if self._count < len(self._chosen) else None

    def add(self, now: int, frame: "VideoFrame") -> None:
        swapped, right_to_left, upside_down = _orientation(frame)
        size = (frame.width, frame.height) if swapped else (frame.height, frame.width)
        self._size = self._size or size
        scaled = {}
        if size != self._size:
            self._other = size
            height, width = self._size[::-1] if swapped else self._size
            scaled = {"width": width, "height": height}
        pixels = _pixels(frame, **scaled)
        pixels = pixels.transpose(1, 0, 2) if swapped else pixels
        pixels = pixels[:: -1 if upside_down else 1, :: -1 if right_to_left else 1]
        fitted = self._fit(pixels)
        if self.frames is None:
            self.frames = np.empty((len(self._chosen), *fitted.shape), np.uint8)
        self.frames[self._count] = fitted
        self._missing += abs(now - self._chosen[self._count]) > self._hole
        self._count += 1

    def report(self, place: str, warn: Warn) -> None:
        if self.failed or self._missing:
            warn(
                f"{place} is damaged: parts of its video can't be decoded. Of the "
                f"{len(self._chosen)} frames used, {self._missing} replace lost ones nearby."
            )
        if self._size and self._other:
            first, other = (f"{width} x {height}" for height, width in (self._size, self._other))
            warn(
                f"{place} changes from {first} to {other} pixels. All frames are scaled to the "
                "first size."
            )


def _read_audio(
    source: Source,
    where: str,
    rate: int,
    timeline: Timeline,
    sampling: Sampling,
    limit_s: float,
    warn: Warn,
) -> Waveform | None:
    """Read the default audio stream for the timeline's span, mono at `rate` Hz."""
    place = f"{where} (its audio)"
    with opened(source, where, "video") as container:
        stream = chosen_stream(container.streams.audio, f"{where}: {name_of(source)}", warn)
        if stream is None:
            return None
        if stream.codec_context is None:
            raise no_decoder(where, source, "audio", VideoError)
        packets = Packets(container, stream)
        frames = _decoded(packets)
        first = next(frames, None)
        if first is None:
            return None
        begins = timeline.start - sampling.start_s
        if first.pts is not None and first.time_base is not None:
            begins = first.pts * first.time_base
        file_rate = first.sample_rate
        late = round((begins - timeline.start) * file_rate)
        silence = min(max(late, 0), round(timeline.seconds * file_rate))
        most = None if sampling.end_s is None else round(timeline.seconds * file_rate)
        heard = chain([first], frames)
        sections = ((frame.sample_rate, frame_samples(frame)) for frame in heard)
        mono = at_one_rate(sections, file_rate, place, warn)
        blocks = _within(mono, max(-late, 0), silence, most)
        start = next(blocks, None)
        if start is None and sampling.start_s:
            warn(
                f"{place} ends before {float(sampling.start_s):.2f} s. The part of the video has "
                "no audio."
            )
            return None
        made = load_waveform(
            {"audio": chain([] if start is None else [start], blocks), "sampling_rate": file_rate},
            rate,
            place,
            limit_s,
        )
        said = [f"{packets.failed} packets of it can't be decoded"] if packets.failed else []
        if said := said + packets.missing:
            warn(f"{place} is damaged: {'; '.join(said)}. The rest is used.")
    return made


def _within(
    blocks: Iterable[Waveform], cut: int, silence: int, most: int | None
) -> Iterator[Waveform]:
    """Yield `silence` zeros, then samples after the first `cut`; at most `most` in all."""
    left = math.inf if most is None else most
    for block in chain([np.zeros(silence, np.float32)] if silence else [], blocks):
        if left <= 0:
            return
        kept = block[cut:][: None if left == math.inf else int(left)]
        cut = max(0, cut - len(block))
        left -= len(kept)
        if len(kept):
            yield kept
