"""Files read in the caller's process, without a codec: plain PCM WAV, and a picture's header."""

import struct

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.helpers import media_work
from qwen3_omni_neuron.helpers.job import MIB, Admit, Decoded, Job, Measured, admit_all

MOST_BYTES = 4 * MIB  # 131 s of 16 kHz; at the lowest rate it becomes 16 MiB
_LEAST_RATE, _MOST_RATE = 8000, 192_000  # Hz; a lower one would become many more samples
_MOST_CHANNELS = 8
_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")  # tag, channels, rate, bytes a second, bytes a frame, bits
# Segments of a JPEG that are looked at: cameras write about ten before the size.
_MOST_JPEG_SEGMENTS = 200
# Markers of a JPEG whose segments give the size: SOF0 to SOF15 without DHT, JPG and DAC.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def decode_inline(job: Job, admit: Admit = admit_all) -> Decoded | None:
    """Decode a small WAV of 16-bit PCM; return None for anything else, which the pool decodes.

    admit: see DecodingPool.decode. Takes a few milliseconds.
    Raises AudioError or PromptTooLongError as the pool does.
    """
    found = None if job.kind != "audio" else _samples(job.content)
    if found is None:
        return None
    samples, rate = found
    warnings: list[str] = []
    given = {**job.options, "audio": samples, "sampling_rate": rate}
    made = media_work.read_audio(job, given, admit, warnings.append)
    item = {"type": "audio", "audio": made, "sampling_rate": job.media.audio_rate}
    measured = Measured(len(made) / job.media.audio_rate, 0, made.nbytes)
    return Decoded(item, measured, tuple(warnings))


def _samples(content: bytes) -> tuple[NDArray[np.int16], int] | None:
    """Return the samples, [samples, channels], and their rate; None if they aren't plain PCM."""
    if len(content) > MOST_BYTES or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return None
    at, form = 12, None
    while at + _CHUNK.size <= len(content):
        name, size = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size
        if size > len(content) - at:
            return None
        if name == b"fmt " and form is None and size >= _FORMAT.size:
            form = _FORMAT.unpack_from(content, at)
        elif name == b"data":
            if form is None or int.from_bytes(content[4:8], "little") + 8 != len(content):
                return None
            return _plain(content, at, size, *form)
        at += size + size % 2
    return None


def _plain(
    content: bytes, at: int, size: int, tag: int, channels: int, rate: int, *rest: int
) -> tuple[NDArray[np.int16], int] | None:
    _, frame_bytes, bits = rest
    usual = tag == 1 and bits == 16 and 1 <= channels <= _MOST_CHANNELS
    if not usual or frame_bytes != 2 * channels or not _LEAST_RATE <= rate <= _MOST_RATE:
        return None
    frames = size // frame_bytes
    if frames <= channels:  # would be read as [channels, samples]
        return None
    samples = np.frombuffer(content, "<i2", frames * channels, at)
    return samples.reshape(frames, channels), rate


def picture_size(content: bytes) -> tuple[int, int] | None:
    """Return a picture's height and width in pixels, or None where its header does not give them.

    content: a PNG, JPEG, WebP, GIF or BMP file, or anything else. Takes some microseconds.
    A picture that waits for its decoder is counted with this size. Nothing depends on whether the
    header tells the truth: the decoder measures the picture again.
    """
    try:
        size = _header_size(content)
    except struct.error:  # the file is cut in its header
        return None
    return size if size is not None and min(size) > 0 else None


def _header_size(content: bytes) -> tuple[int, int] | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", content, 16)
        return height, width
    if content.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", content, 6)
        return height, width
    if content.startswith(b"BM"):
        (header_bytes,) = struct.unpack_from("<I", content, 14)
        sides = "<HH" if header_bytes == 12 else "<ii"  # the first is OS/2's
        width, height = struct.unpack_from(sides, content, 18)
        return abs(height), width  # the rows of a negative height start at the top
    if content.startswith(b"\xff\xd8"):
        return _jpeg_size(content)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _webp_size(content)
    return None


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(_MOST_JPEG_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", content, at)
        if mark != 0xFF:
            return None
        if kind in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", content, at + 5)
            return height, width
        at += 2 + length
    return None


def _webp_size(content: bytes) -> tuple[int, int] | None:
    kind = content[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, 26)
        return height & 0x3FFF, width & 0x3FFF  # the upper two bits are a scale
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", content, 24)
        return (high_height << 16 | low_height) + 1, (high_width << 16 | low_width) + 1
    return None
