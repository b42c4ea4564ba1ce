"""Videos in every container and codec that PyAV writes here, and damages of them."""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from testing.made_recordings import Unseekable
from testing.made_videos import STEP
from testing.media_corpus.sounds import CUTS, encoders

FRAMES, RATE = 25, 25
SIZES = ((48, 64), (144, 176), (576, 720))  # height, width; some codecs have few
WITHOUT_RATE = ("fits", "h261", "h263")  # containers that hold no rate of frames
_OPTIONS = {"strict": "-2"}  # encoders that FFmpeg calls experimental, too
FORMATS = ("yuv420p", "yuv422p", "yuv444p", "rgb24", "bgr24", "gray", "monow")


@dataclass(frozen=True)
class Clip:
    """A video file. name: what was done to it. parts: number of videos that it has in a row."""

    container: str
    codec: str
    name: str
    content: bytes
    parts: int = 1

    @property
    def damage(self) -> str:
        """Kind of what was done, such as "cut"."""
        return self.name.split(":")[0]

    def __str__(self) -> str:
        return f"{self.container} {self.codec}, {self.name}"


def containers() -> list[str]:
    """Return the names of FFmpeg's containers of videos that are one file."""
    import av
    from av.format import ContainerFormat

    found = []
    for name in sorted(av.formats_available):
        form = ContainerFormat(name)
        # Pictures in a row are no file of a video.
        if form.is_output and not form.no_file and name != "image2pipe":
            with av.open(io.BytesIO(), "w", format=name) as out:
                if out.default_video_codec != "none" and form.is_input:
                    found.append(name)
    return found


def codecs(container: str) -> Iterator[str]:
    """Yield the names of the encoders that a container takes, as far as it says."""
    import av
    from av.codec import Codec

    with av.open(io.BytesIO(), "w", format=container) as out:
        listed = out.supported_codecs | {out.default_video_codec}
    for name in encoders("video"):
        hardware = name.endswith(("_amf", "_nvenc", "_qsv", "_v4l2m2m", "_vaapi", "_videotoolbox"))
        if not hardware and {name, Codec(name, "w").canonical_name} & listed:
            yield name


@lru_cache
def _setting(codec: str) -> tuple[tuple[int, int], str] | None:
    """Return the height and width, and the format of pixels, with which an encoder begins."""
    from av.codec import Codec, CodecContext

    taken = [str(form.name) for form in Codec(codec, "w").video_formats or []]
    form = next((form for form in FORMATS if form in taken), taken[0] if taken else FORMATS[0])
    for size in SIZES:
        context: Any = CodecContext.create(codec, "w")
        context.height, context.width, context.pix_fmt = *size, form
        context.time_base, context.framerate = Fraction(1, RATE), Fraction(RATE)
        context.options = _OPTIONS
        try:
            context.open()
        except Exception:  # FFmpeg's errors for a size that the codec does not have
            continue
        return size, form
    return None


def _write(container: str, codec: str, size: tuple[int, int], form: str, piped: bool) -> bytes:
    import av

    target: Any = Unseekable() if piped else io.BytesIO()
    with av.open(target, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=RATE)
        stream.height, stream.width, stream.pix_fmt = *size, form
        stream.codec_context.time_base = Fraction(1, RATE)
        stream.codec_context.options = _OPTIONS
        out.start_encoding()
        for index in range(FRAMES):
            pixels = np.full((*size, 3), STEP * index, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, RATE)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return bytes(target.content) if piped else target.getvalue()


def cases(container: str, codec: str, *, every: bool) -> Iterator[Clip]:
    """Yield a whole video and damaged ones; nothing if the container can't hold the codec.

    every: all of them. Otherwise one, which the codecs take in turn.
    """
    content = _try(container, codec)
    if not content:
        return
    case = Clip(container, codec, "whole", content)
    yield case
    size = len(content)
    ends = [round(size * (tenth + 0.5) / CUTS) for tenth in range(CUTS)]
    damaged = [
        replace(case, name="joined", content=2 * content, parts=2),
        *(replace(case, name=f"cut: at {end} of {size}", content=content[:end]) for end in ends),
    ]
    if not every:
        yield damaged[zlib.crc32(f"{container} {codec}".encode()) % len(damaged)]
        return
    yield from damaged
    piped = _try(container, codec, piped=True)
    if piped:
        yield replace(case, name="piped", content=piped)


def _try(container: str, codec: str, *, piped: bool = False) -> bytes:
    """Return a video of FRAMES flat greys that tell their number; nothing if that can't be."""
    setting = _setting(codec)
    if setting is None:
        return b""
    try:
        return _write(container, codec, *setting, piped)
    except Exception:  # FFmpeg's and PyAV's errors for what a container can't hold
        return b""


def by_pyav(content: bytes) -> list[np.ndarray]:
    """Return the frames that PyAV decodes packet by packet, uint8 [height, width, 3] each."""
    import av

    frames: list[np.ndarray] = []
    try:
        with av.open(io.BytesIO(content), metadata_errors="ignore") as container:
            if not container.streams.video:
                return []
            for packet in container.demux(container.streams.video[0]):
                try:
                    frames += [frame.to_ndarray(format="rgb24") for frame in packet.decode()]
                except (av.FFmpegError, ValueError):
                    continue
    except (av.FFmpegError, ValueError, ArithmeticError, AttributeError, IndexError):
        pass
    return frames
