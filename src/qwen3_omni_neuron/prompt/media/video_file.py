"""Video file -> the frames that the model sees, their rate, and the audio.

PyAV decodes. A file is read twice: first its packets, without decoding, for the frames' timestamps;
then its frames, of which the chosen ones are kept. Its audio is read in a third pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import VideoError
from qwen3_omni_neuron.prompt.media.audio import Waveform, load_waveform, too_long
from qwen3_omni_neuron.prompt.media.container import no_decoder, opened
from qwen3_omni_neuron.prompt.media.fields import Source, Warn, ignore, name_of
from qwen3_omni_neuron.prompt.media.video_times import Timeline, choose_frames, read_timeline

if TYPE_CHECKING:
    from av import VideoFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frames = NDArray[np.uint8]
Fit = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
"""Function of an upright frame, [height, width, 3], that returns the frame to keep; may raise."""
_COMPLETE = Fraction(9, 10)  # part of the header's length, which is not exact to a frame


@dataclass(frozen=True)
class VideoHeader:
    """Sizes of a file's video and audio, known before anything is decoded.

    frames: number of frames that the model sees. height, width: size of a frame before rotation.
    seconds: length of the video. audio_s: length of the audio, as far as the file says; 0 if there
    is no audio or it isn't wanted.
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

    frames: uint8 [n, height, width, 3], RGB.
    fps: rate of these frames, so frame i is shown i / fps seconds after the first.
    audio: float32 [samples] at the requested rate, mono, from the first frame on.
    """

    frames: Frames
    fps: float
    audio: Waveform | None = None


class _DisorderError(Exception):
    """Decoded frames, which come in display order, have descending timestamps.

    Seen in AVI with H.264, which stores no presentation timestamps: FFmpeg gives decoding times.
    """


def accept_all(header: VideoHeader) -> None:
    """Accept every video: the default check."""


def keep_whole(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Keep a frame as it is: the default fit."""
    return frame


def read_video_file(
    source: Source,
    where: str,
    *,
    fps: float,
    max_frames: int,
    audio_rate: int | None,
    limit_s: float = math.inf,
    check: Check = accept_all,
    fit: Fit = keep_whole,
    threads: int = 0,
    warn: Warn = ignore,
) -> Video:
    """Read a file's frames, evenly spread over its length, and its audio if audio_rate is given.

    The k-th of n frames is frame floor(k * total / n) of the file, as in the reference. In a file
    of variable frame rate it is the frame shown at k / n of the length, by the presentation
    timestamps. In both cases frame k of the result is shown at k / Video.fps seconds, with
    Video.fps = n / length, which is near `fps`, not equal. Frames are rotated by the file's
    rotation.
    Video.audio is None if the file has no audio. It is delayed, or cut at its beginning, to begin
    with the first frame.
    limit_s: longest audio. check: called before anything is decoded. fit: called with each frame,
    to keep a smaller one. threads: number of threads of the video's decoder; 0: as many as there
    are cores. warn: called for a file that is not used whole, or not as it is.
    Raises VideoError when the file can't be decoded, AudioError when its audio is too short, and
    PromptTooLongError when it is too long.
    """
    with opened(source, where, "video", VideoError) as container:
        stream = _video_stream(container, source, where, threads)
        timeline = read_timeline(container, stream, fps)
        if not len(timeline.ticks):
            raise VideoError(
                f"{where}: {name_of(source)} has a video stream without any frame. Export it again."
            )
        # MP4 stores the length of each stream; in other formats FFmpeg guesses it, sometimes wrong.
        if "mp4" in container.format.name and stream.duration and stream.time_base:
            promised = stream.duration * stream.time_base
            if timeline.seconds < _COMPLETE * promised:
                raise VideoError(
                    f"{where}: {name_of(source)} is cut short: of {float(promised):.2f} s of video "
                    f"{float(timeline.seconds):.2f} s are there. Copy or export it again."
                )
        chosen = choose_frames(timeline, fps, max_frames)
        audio_s = 0.0 if audio_rate is None else _audio_seconds(container, timeline)
        seconds = float(timeline.seconds)
        check(VideoHeader(len(chosen), stream.height, stream.width, seconds, audio_s))
    try:
        frames = _read_frames(source, where, timeline, chosen, fit, threads)
    except _DisorderError:
        timeline = timeline.by_count()
        chosen = choose_frames(timeline, fps, max_frames)
        frames = _read_frames(source, where, timeline, chosen, fit, threads)
    if frames is None:
        raise VideoError(f"{where}: no frame of {name_of(source)} can be decoded. Export it again.")
    audio = None
    if audio_rate is not None:
        audio = _read_audio(source, where, audio_rate, timeline, limit_s)
    return Video(frames, float(len(frames) / timeline.seconds), audio)


def _video_stream(
    container: "InputContainer", source: Source, where: str, threads: int
) -> "VideoStream":
    from av.stream import Disposition

    # A song's cover image is a video stream of one frame, but not a video.
    videos = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    for stream in videos:
        if stream.codec_context is not None:
            stream.thread_type, stream.codec_context.thread_count = "AUTO", threads
            return stream
    if videos:
        raise no_decoder(where, source, "video", VideoError)
    others = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
    raise VideoError(
        f"{where}: {name_of(source)} has no video stream that can be decoded, only {others}. Give "
        "a video, or frames."
    )


def _audio_seconds(container: "InputContainer", timeline: Timeline) -> float:
    """Return the length of the audio by the file's header, or else the length of the video."""
    if not container.streams.audio:
        return 0.0
    stream = container.streams.audio[0]
    if stream.duration and stream.time_base:
        return max(0.0, float(stream.duration * stream.time_base))
    return float(timeline.seconds)


def _read_frames(
    source: Source, where: str, timeline: Timeline, chosen: list[int], fit: Fit, threads: int
) -> Frames | None:
    with opened(source, where, "video", VideoError) as container:
        stream = _video_stream(container, source, where, threads)
        return _decode(container, stream, chosen, timeline.counted, fit)


def _decode(
    container: "InputContainer",
    stream: "VideoStream",
    chosen: list[int],
    counted: bool,
    fit: Fit,
) -> Frames | None:
    """Decode the frame shown at each chosen tick, without keeping others in memory."""
    kept = _KeptFrames(len(chosen), fit)
    previous: VideoFrame | None = None
    latest: int | None = None
    for index, frame in enumerate(container.decode(stream)):
        now = index if counted else frame.pts
        if now is not None and latest is not None and now < latest:
            raise _DisorderError
        latest = latest if now is None else now
        while now is not None and kept.count < len(chosen) and now > chosen[kept.count]:
            kept.add(previous or frame)
        if kept.count == len(chosen):
            return kept.frames
        previous = frame
    while previous is not None and kept.count < len(chosen):
        kept.add(previous)
    return kept.frames


class _KeptFrames:
    """Chosen frames: upright, fitted, and of one size.

    n: final number of frames. count: number of frames so far. frames: None while there are none.
    """

    def __init__(self, n: int, fit: Fit):
        self._n, self._fit = n, fit
        self._size: tuple[int, ...] | None = None  # the first frame's, upright, not yet fitted
        self.count = 0
        self.frames: Frames | None = None

    def add(self, frame: "VideoFrame") -> None:
        """Add the next frame."""
        pixels: NDArray[Any]
        quarters = round(frame.rotation / 90)  # counterclockwise
        if self._size is None:
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarters)
            self._size = pixels.shape[:2]
        else:  # a stream may change its size: later frames are scaled to the size of the first
            height, width = self._size if quarters % 2 == 0 else self._size[::-1]
            scaled = frame.to_ndarray(format="rgb24", width=width, height=height)
            pixels = np.rot90(scaled, quarters)
        fitted = self._fit(pixels)
        if self.frames is None:
            self.frames = np.empty((self._n, *fitted.shape), np.uint8)
        self.frames[self.count] = fitted
        self.count += 1


def _read_audio(
    source: Source, where: str, rate: int, timeline: Timeline, limit_s: float
) -> Waveform | None:
    """Read the first audio stream, mono at `rate` Hz, from the first frame on.

    Returns None if the file has no audio.
    """
    import av

    pieces: list[NDArray[Any]] = []
    begins, count, place = timeline.start, 0, f"{where} (its audio)"
    with opened(source, where, "video", VideoError) as container:
        if not container.streams.audio:
            return None
        stream: AudioStream = container.streams.audio[0]
        if stream.codec_context is None:
            raise no_decoder(where, source, "audio", VideoError)
        resampler = av.AudioResampler(format="fltp")  # rate and channels stay as they are
        for frame in container.decode(stream):
            if not pieces and frame.pts is not None and frame.time_base is not None:
                begins = frame.pts * frame.time_base
            file_rate = frame.sample_rate
            # [channels, samples] -> [samples]
            parts = [part.to_ndarray().mean(axis=0) for part in resampler.resample(frame)]
            pieces += parts
            count += sum(map(len, parts))
            late = round((begins - timeline.start) * file_rate)
            silence = min(max(late, 0), round(timeline.seconds * file_rate))
            if silence - max(-late, 0) + count > limit_s * file_rate:
                raise too_long(place, "lasts longer", limit_s)
    if not pieces:
        return None
    samples = np.concatenate([np.zeros(silence, np.float32), *pieces])[max(-late, 0) :]
    return load_waveform({"audio": samples, "sampling_rate": file_rate}, rate, place, limit_s)
