"""Media files that are small and say, or become, something large; and files that are broken."""

import io
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from testing.made_videos import make_video

_ZEROS_BLOCK = 1 << 20  # zeros in one block of the streams below


# Pictures


def zeros_stream(count: int) -> bytes:
    """Return a zlib stream of zeros. A full flush before each block makes all blocks equal."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    pieces, rest = divmod(count, _ZEROS_BLOCK)
    piece = packer.compress(bytes(_ZEROS_BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    end = last.compress(bytes(rest)) + last.flush()
    checksum = (count % 65521) << 16 | 1  # Adler-32
    return b"\x78\xda" + pieces * piece + end + checksum.to_bytes(4, "big")


def png(
    width: int, height: int, kind: int = 2, extra: bytes = b"", pixels: bytes | None = None
) -> bytes:
    """Return a black PNG. kind: 2 RGB, 6 RGBA, 0 grey. extra: chunks before the pixels."""
    channels = {0: 1, 2: 3, 6: 4}[kind]
    if pixels is None:
        pixels = zeros_stream(height * (1 + width * channels))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG."""
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def picture(form: str, size: tuple[int, int] = (64, 64), **how: Any) -> bytes:
    """Return a small honest picture."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, form, **how)
    return file.getvalue()


@cache
def picture_bombs() -> Mapping[str, bytes]:
    """Return pictures that claim to be, or become, larger than allowed."""
    return {
        "PNG of 400 megapixels": png(20_000, 20_000, 0),
        "PNG that says it has 4 gigapixels": png(65_535, 65_535, 2, pixels=zeros_stream(100)),
    }


# Sound


def flac_of_zeros(
    seconds: float, rate: int, channels: int = 1, says_samples: int | None = None
) -> bytes:
    """Return a FLAC of silence with frames of 65,535 samples, a dozen bytes each.

    says_samples: the number of samples in its header, in place of the true one.
    """
    block = 65_535
    frames = max(1, round(seconds * rate / block))
    total = frames * block if says_samples is None else says_samples
    bits = rate << 44 | (channels - 1) << 41 | 7 << 36 | total  # 8 bits a sample
    info = struct.pack(">HH", block, block) + bytes(6) + bits.to_bytes(8, "big") + bytes(16)
    parts = [b"fLaC\x80\0\0\x22", info]
    for number in range(frames):
        head = bytes((0xFF, 0xF8, 0x70, (channels - 1) << 4 | 0))
        head += chr(number).encode("utf-8", "surrogatepass") + struct.pack(">H", block - 1)
        head += bytes([_crc(head, 8, 0x07)])
        body = head + bytes(2 * channels)  # each channel is one constant
        parts.append(body + struct.pack(">H", _crc(body, 16, 0x8005)))
    return b"".join(parts)


@cache
def _crc_table(bits: int, polynomial: int) -> tuple[int, ...]:
    found = []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value = value << 1 ^ (polynomial if value >> (bits - 1) & 1 else 0)
        found.append(value & ((1 << bits) - 1))
    return tuple(found)


def _crc(content: bytes, bits: int, polynomial: int) -> int:
    table, value = _crc_table(bits, polynomial), 0
    for byte in content:
        value = (value << 8 ^ table[(value >> (bits - 8) ^ byte) & 255]) & ((1 << bits) - 1)
    return value


@cache
def sound(form: str, subtype: str | None = None, seconds: float = 1.0) -> bytes:
    """Return a small honest sound file: a tone of 16 kHz."""
    file = io.BytesIO()
    tone = 0.3 * np.sin(np.arange(round(seconds * 16_000)) / 9)
    soundfile.write(file, tone.astype(np.float32), 16_000, format=form, subtype=subtype)
    return file.getvalue()


@cache
def sound_bombs() -> Mapping[str, bytes]:
    """Return sound files that claim to be, or become, larger than allowed."""
    return {
        "FLAC of two hours": flac_of_zeros(7200, 16_000),
        "FLAC that says it has 2^36 samples": flac_of_zeros(1, 16_000, says_samples=(1 << 36) - 1),
        "FLAC that says it has no samples": flac_of_zeros(7200, 16_000, says_samples=0),
    }


# Videos


@cache
def video(container: str, codec: str = "mpeg4") -> bytes:
    """Return a small honest video: a second of 64 x 48."""
    return make_video(container=container, codec=codec)


def mp4_that_says(seconds: int | None = None, side: int | None = None) -> bytes:
    """Return a one-second MP4 with another duration, or with other sizes."""
    one = bytearray(video("mp4"))
    if seconds is not None:
        for name, at_scale in ((b"mvhd", 16), (b"mdhd", 16)):
            at = one.index(name)
            scale = struct.unpack_from(">I", one, at + at_scale)[0]
            one[at + 20 : at + 24] = struct.pack(">I", min(seconds * scale, 0xFFFFFFFE))
    if side is not None:
        at = one.index(b"tkhd")
        one[at + 80 : at + 88] = struct.pack(">II", side << 16, side << 16)
        at = one.index(b"mp4v", one.index(b"stsd"))
        one[at + 28 : at + 32] = struct.pack(">HH", side, side)
    return bytes(one)


@cache
def video_bombs() -> Mapping[str, bytes]:
    """Return videos that claim more than is allowed, or that name files."""
    return {
        "MP4 that says it lasts 19 hours": mp4_that_says(seconds=70_000),
        "MP4 that says it has 4 gigapixels": mp4_that_says(side=65_535),
        "playlist of a file": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "list of files": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "session of a host": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\n"
        b"m=video 9 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    }


@cache
def honest() -> Mapping[str, tuple[str, bytes]]:
    """Return an honest file of each format, with its kind: audio, image or video."""
    pictures = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
    sounds = {"WAV": "PCM_16", "FLAC": "PCM_16", "MP3": None, "OGG": "VORBIS", "AIFF": None}
    found = {name: ("image", picture(name)) for name in pictures}
    found |= {name: ("audio", sound(name, how)) for name, how in sounds.items()}
    found["OPUS"] = "audio", sound("OGG", "OPUS")
    return found | {k: ("video", video(k)) for k in ("mp4", "avi", "matroska", "mpegts")}


def garbage(content: bytes, seed: int = 0) -> bytes:
    """Return a file that begins like this one and continues as noise."""
    return content[:32] + np.random.default_rng(seed).integers(0, 256, 4096, np.uint8).tobytes()
