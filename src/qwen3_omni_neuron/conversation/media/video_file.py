"""Video file -> the frames that the model sees, their rate, and the audio.

PyAV decodes. A file is read twice: first its packets, without decoding, for the frames'
timestamps; then its frames, of which the chosen ones are kept. Its audio takes a third reading.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.audio import Waveform, load_waveform
from qwen3_omni_neuron.conversation.media.fields import Source, name_of, open_media
from qwen3_omni_neuron.conversation.media.video_times import Timeline, choose_frames, read_timeline
from qwen3_omni_neuron.errors import VideoError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frames = NDArray[np.uint8]
Check = Callable[[int, int, int], object]
"""Function of the number, height and width of a video's frames; may raise."""
_COMPLETE = Fraction(9, 10)  # of the length in the header, which is not exact to a frame


@dataclass(frozen=True, eq=False)
class Video:
    """Frames and audio of a video for the model.

    frames: uint8 [n, height, width, 3], RGB.
    fps: rate of these frames, so frame i is shown i / fps seconds after the first.
    audio: float32 [samples] at the rate that was asked for, mono, from the first frame on.
    """

    frames: Frames
    fps: float
    audio: Waveform | None = None


class _DisorderError(Exception):
    """Decoded frames, which come in the order they are shown, have descending timestamps.

    Seen in AVI of H.264: it stores no presentation timestamps, and FFmpeg gives decoding times.
    """


def accept_all(frames: int, height: int, width: int) -> None:
    """Accept every video: the default check."""


def read_video_file(
    source: Source,
    where: str,
    *,
    fps: float,
    max_frames: int,
    audio_rate: int | None,
    check: Check = accept_all,
) -> Video:
    """Read a file's frames, evenly spread over its length, and its audio where audio_rate is given.

    Which frames: the k-th of n is frame floor(k * total / n) of the file, as in the reference. In
    a file of variable frame rate it is the frame that is shown at k / n of the length, by the
    presentation timestamps. In both cases frame k of the result is shown at k / Video.fps seconds,
    with Video.fps = n / length, which is near `fps`, not equal. Frames are rotated by the file's
    rotation.
    Video.audio is None where the file has no audio. It is delayed, or cut at its beginning, to
    begin with the first frame.
    check: called with the number, height and width of the frames before any is decoded.
    Raises VideoError when the file can't be decoded, or AudioError when its audio is too short.
    """
    with _opened(source, where) as container:
        stream = _video_stream(container, source, where)
        timeline = read_timeline(container, stream, fps)
        if not len(timeline.ticks):
            raise VideoError(
                f"{where}: {name_of(source)} has a video stream without any frame. Export it again."
            )
        # MP4 stores the length of each stream; in other formats it is a guess, sometimes wrong.
        if "mp4" in container.format.name and stream.duration and stream.time_base:
            promised = stream.duration * stream.time_base
            if timeline.seconds < _COMPLETE * promised:
                raise VideoError(
                    f"{where}: {name_of(source)} is cut short: of {float(promised):.2f} s of video "
                    f"{float(timeline.seconds):.2f} s are there. Copy or export it again."
                )
        chosen = choose_frames(timeline, fps, max_frames)
        check(len(chosen), stream.height, stream.width)
    try:
        frames = _read_frames(source, where, timeline, chosen)
    except _DisorderError:
        timeline = timeline.by_count()
        frames = _read_frames(source, where, timeline, choose_frames(timeline, fps, max_frames))
    if frames is None:
        raise VideoError(f"{where}: no frame of {name_of(source)} can be decoded. Export it again.")
    audio = None if audio_rate is None else _read_audio(source, where, audio_rate, timeline)
    return Video(frames, float(len(frames) / timeline.seconds), audio)


class _Nameless:
    """File object without a name, so that FFmpeg finds the format from the content alone."""

    def __init__(self, file: BinaryIO):
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


@contextmanager
def _opened(source: Source, where: str) -> "Iterator[InputContainer]":
    try:
        import av
    except ImportError as error:
        raise VideoError(
            f"{where} is a video file, which PyAV decodes, and it isn't installed. "
            "Run: pip install 'qwen3-omni-neuron[video]'; or give frames, with their fps."
        ) from error
    # FFmpeg also reads playlists, which name other files, on this machine or another. Without any
    # protocol it can't open those; the file that we opened ourselves needs none.
    options = {"protocol_whitelist": ""}
    with open_media(source, where, VideoError) as file:
        try:
            with av.open(
                _Nameless(file), "r", options=options, metadata_errors="replace"
            ) as container:
                yield container
        except av.FFmpegError as error:
            raise VideoError(
                f"{where}: {name_of(source)} can't be decoded as video; it is something else, "
                f"broken or cut short ({error}). Export it again."
            ) from error


def _video_stream(container: "InputContainer", source: Source, where: str) -> "VideoStream":
    from av.stream import Disposition

    for stream in container.streams.video:
        # The cover image of a song is a video stream of one frame, but not a video.
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None:
            stream.thread_type = "AUTO"
            return stream
    others = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
    raise VideoError(
        f"{where}: {name_of(source)} has no video stream that can be decoded, only {others}. Give "
        "a video, or frames."
    )


def _read_frames(
    source: Source, where: str, timeline: Timeline, chosen: list[int]
) -> Frames | None:
    with _opened(source, where) as container:
        stream = _video_stream(container, source, where)
        return _decode(container, stream, chosen, timeline.counted)


def _decode(
    container: "InputContainer", stream: "VideoStream", chosen: list[int], counted: bool
) -> Frames | None:
    """Decode the frame that is shown at each chosen tick, with no others in memory."""
    kept: Frames | None = None
    filled = 0
    previous: VideoFrame | None = None
    latest: int | None = None
    for index, frame in enumerate(container.decode(stream)):
        now = index if counted else frame.pts
        if now is not None and latest is not None and now < latest:
            raise _DisorderError
        latest = latest if now is None else now
        while now is not None and filled < len(chosen) and now > chosen[filled]:
            kept = _keep(previous or frame, kept, filled, len(chosen))
            filled += 1
        if filled == len(chosen):
            return kept
        previous = frame
    while previous is not None and filled < len(chosen):
        kept = _keep(previous, kept, filled, len(chosen))
        filled += 1
    return kept


def _keep(frame: "VideoFrame", kept: Frames | None, index: int, n: int) -> Frames:
    quarters = round(frame.rotation / 90)  # counterclockwise
    if kept is None:
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarters)
        kept = np.empty((n, *pixels.shape), np.uint8)
    else:  # a stream may change its size: later frames are scaled to the size of the first
        height, width = kept.shape[1:3] if quarters % 2 == 0 else kept.shape[2:0:-1]
        pixels = np.rot90(frame.to_ndarray(format="rgb24", width=width, height=height), quarters)
    kept[index] = pixels
    return kept


def _read_audio(source: Source, where: str, rate: int, timeline: Timeline) -> Waveform | None:
    """Read the first audio stream, mono at `rate` Hz, from the first frame on.

    None where the file has no audio.
    """
    import av

    pieces: list[NDArray[Any]] = []
    begins = timeline.start
    with _opened(source, where) as container:
        if not container.streams.audio:
            return None
        resampler = av.AudioResampler(format="fltp")  # rate and channels stay as they are
        for frame in container.decode(container.streams.audio[0]):
            if not pieces and frame.pts is not None and frame.time_base is not None:
                begins = frame.pts * frame.time_base
            file_rate = frame.sample_rate
            # [channels, samples] -> [samples]
            pieces += [part.to_ndarray().mean(axis=0) for part in resampler.resample(frame)]
    if not pieces:
        return None
    late = round((begins - timeline.start) * file_rate)
    silence = min(max(late, 0), round(timeline.seconds * file_rate))
    samples = np.concatenate([np.zeros(silence, np.float32), *pieces])[max(-late, 0) :]
    item = {"audio": samples, "sampling_rate": file_rate}
    return load_waveform(item, rate, f"{where} (its audio)")
