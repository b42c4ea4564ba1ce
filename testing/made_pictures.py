"""Picture files for tests, byte by byte: forms that Pillow reads and does not write."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.generic]
"""Numbers [height, width, channels] of a picture, as they are stored."""


def _packed(row: Samples, bits: int, order: Literal["<", ">"]) -> bytes:
    """Return a row's numbers of so many bits. order: of the bytes of one."""
    if bits >= 8 and bits != 12:
        return row.astype(row.dtype.newbyteorder(order)).tobytes()
    digits = (row.reshape(-1, 1).astype(int) >> np.arange(bits)[::-1]) & 1
    return np.packbits(digits.reshape(-1).astype(np.uint8)).tobytes()


def png(samples: Samples, kind: int, bits: int, chunks: Mapping[bytes, bytes]) -> bytes:
    """Return a PNG. kind: its colour type."""
    rows = b"".join(b"\0" + _packed(row, bits, ">") for row in samples)
    size = struct.pack(">II5B", samples.shape[1], samples.shape[0], bits, kind, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n"
    for name, data in {b"IHDR": size, **chunks, b"IDAT": zlib.compress(rows), b"IEND": b""}.items():
        checksum = struct.pack(">I", zlib.crc32(name + data))
        made += struct.pack(">I", len(data)) + name + data + checksum
    return made


def tiff(
    samples: Samples,
    bits: int,
    photometric: int,
    *,
    form: int = 1,
    extra: Sequence[int] = (),
) -> bytes:
    """Return a TIFF. form: of its numbers: 1 unsigned, 2 signed, 3 floats. extra: ExtraSamples."""
    height, width, channels = samples.shape
    data = b"".join(_packed(row, bits, "<") for row in samples)
    tags = {256: [width], 257: [height], 258: [bits] * channels, 259: [1], 262: [photometric]}
    tags |= {273: [0], 277: [channels], 278: [height], 279: [len(data)], 338: list(extra)}
    tags = {tag: values for tag, values in (tags | {339: [form] * channels}).items() if values}
    begin, more, entries = 8 + 2 + 12 * len(tags) + 4, b"", b""
    tags[273] = [begin + sum(2 * len(values) for values in tags.values() if len(values) > 2)]
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}H", *values)
        place = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<I", begin + len(more))
        more += packed if len(packed) > 4 else b""
        entries += struct.pack("<HHI", tag, 3, len(values)) + place
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + more + data


def bmp(samples: Samples) -> bytes:
    """Return a BMP of 32 bits a pixel, blue, green, red and alpha, whose header names alpha."""
    height, width, _ = samples.shape
    rows = samples[::-1].tobytes()
    head = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, len(rows), 0, 0, 0, 0)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000).ljust(68, b"\0")
    return b"BM" + struct.pack("<IHHI", 122 + len(rows), 0, 0, 122) + head + masks + rows
