"""Videos for tests: frames of a flat grey that encodes their number, and a tone of 440 Hz."""

import io
import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from testing.made_recordings import Unseekable

SIZE = (48, 64)  # height, width
TONE_RATE = 44100
STEP = 6  # brightness between two frames; coding changes it by about 2


def frame_numbers(frames: np.ndarray) -> list[int]:
    """Return the numbers of frames in their file, read from the grey in their middle."""
    middle = frames[:, frames.shape[1] // 2, frames.shape[2] // 2, :].astype(float).mean(axis=1)
    return [round(float(grey) / STEP) for grey in middle]


def with_edits(video: bytes, parts: Sequence[tuple[float, float | None]]) -> bytes:
    """Return an MP4 of make_video with an edit list for every track.

    parts: length, and where in the track it begins, in seconds; None: nothing is shown.
    """
    made = bytearray(video)
    movie_rate = int.from_bytes(video[video.index(b"mvhd") + 16 :][:4], "big")
    for found in reversed([at.start() for at in re.finditer(b"elst", video)]):
        rate = int.from_bytes(video[video.index(b"mdhd", found) + 16 :][:4], "big")
        first = int.from_bytes(
            video[found + 16 : found + 20], "big"
        )  # FFmpeg's, of the first frame
        made[found + 8 : found + 24] = struct.pack(">I", len(parts))
        for length, begin in reversed(parts):
            at = -1 if begin is None else round(begin * rate) + first
            entry = struct.pack(">IiI", round(length * movie_rate), at, 1 << 16)
            made[found + 12 : found + 12] = entry
        for name in (b"elst", b"edts", b"trak", b"moov"):  # moov is the last box
            at = video.rindex(name, 0, found + 4) - 4
            (size,) = struct.unpack_from(">I", made, at)
            struct.pack_into(">I", made, at, size + 12 * (len(parts) - 1))
    return bytes(made)


def make_video(
    n: int = 30,
    *,
    rate: int = 30,
    container: str = "mp4",
    codec: str = "mpeg4",
    times_ms: Sequence[int] | None = None,
    b_frames: int = 0,
    turned: tuple[int, bool, bool] | None = None,
    audio: str | None = None,
    audio_late_s: float = 0.0,
    audio_s: float = 1.0,
    video: bool = True,
    file: Path | None = None,
    options: dict[str, str] | None = None,
    piped: bool = False,
) -> bytes:
    """Return the bytes of a video of n frames (at most 40, so that the greys differ).

    times_ms: each frame's timestamp; 1 / rate apart by default. The upper left corner is white, to
    tell orientations apart. turned: degrees counterclockwise, whether it is then mirrored from left
    to right, and from top to bottom, by its display matrix. audio: codec of a stereo track, whose
    right channel is silent. file: path to write the video to as well; some options need a real
    file. piped: written without seeking.
    """
    import av

    memory: Any = Unseekable() if piped else io.BytesIO()
    target: Any = memory if file is None else str(file)
    clock = Fraction(1, 1000) if times_ms is not None else Fraction(1, rate)
    with av.open(target, "w", format=container, options=options or {}) as out:
        if video:
            stream: Any = out.add_stream(codec, rate=rate)
            stream.height, stream.width = SIZE
            stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
            stream.codec_context.time_base = clock
            stream.max_b_frames = b_frames
            if turned is not None:
                stream.set_display_rotation(*turned)
        if audio is not None:
            tone: Any = out.add_stream(audio, rate=TONE_RATE)
        for index in range(n if video else 0):
            pixels = np.full((*SIZE, 3), index * STEP, np.uint8)
            pixels[:16, :16] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index if times_ms is None else times_ms[index]
            frame.time_base = clock
            out.mux(stream.encode(frame))
        if video:
            out.mux(stream.encode())
        if audio is not None:
            for start in range(0, round(audio_s * TONE_RATE), 1024):
                wave = np.sin(2 * np.pi * 440 * np.arange(start, start + 1024) / TONE_RATE)
                both = np.stack([wave, np.zeros(1024)]).astype(np.float32)
                part = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
                part.sample_rate, part.time_base = TONE_RATE, Fraction(1, TONE_RATE)
                part.pts = start + round(audio_late_s * TONE_RATE)
                out.mux(tone.encode(part))
            out.mux(tone.encode())
    if piped:
        return bytes(memory.content)
    return memory.getvalue() if file is None else file.read_bytes()
