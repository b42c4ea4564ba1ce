"""Size of a picture by the first bytes of its file, before a decoder has it.

A picture that waits for its decoder is counted with this size. Nothing depends on whether the
header tells the truth: the decoder measures the picture again.
"""

import struct

# Segments of a JPEG that are looked at: cameras write about ten before the size.
_MOST_SEGMENTS = 200
# Markers of a JPEG whose segments give the size: SOF0 to SOF15 without DHT, JPG and DAC.
_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def picture_size(content: bytes) -> tuple[int, int] | None:
    """Return a picture's height and width in pixels, or None where its header does not give them.

    content: a PNG, JPEG, WebP, GIF or BMP file, or anything else. Takes some microseconds.
    """
    try:
        size = _size(content)
    except struct.error:  # the file is cut in its header
        return None
    return size if size is not None and min(size) > 0 else None


def _size(content: bytes) -> tuple[int, int] | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", content, 16)
        return height, width
    if content.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", content, 6)
        return height, width
    if content.startswith(b"BM"):
        width, height = struct.unpack_from("<ii", content, 18)
        return abs(height), width  # the rows of a negative height start at the top
    if content.startswith(b"\xff\xd8"):
        return _jpeg_size(content)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _webp_size(content)
    return None


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", content, at)
        if mark != 0xFF:
            return None
        if kind in _SIZES:
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
