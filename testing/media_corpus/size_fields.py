"""Places in a file's header that say how long it is."""

import struct
from collections.abc import Iterator

Field = tuple[str, int, int]
"""Name, and the places in the file of its first byte and of the byte after it."""


def size_fields(content: bytes) -> list[Field]:
    """Return the fields of a file that say its own length, or a part's; empty if none is known."""
    begin = content[:4]
    if begin in (b"RIFF", b"RF64", b"RIFX", b"FORM"):
        return list(_riff(content, ">" if begin in (b"RIFX", b"FORM") else "<"))
    if content[4:8] == b"ftyp" or content[4:8] == b"moov" or content[4:8] == b"wide":
        return list(_boxes(content, 0, len(content)))
    fixed = {
        b".snd": [("data", 8, 12)],
        b"dns.": [("data", 8, 12)],
        b"fLaC": [("samples", 22, 26)],
        b"TTA1": [("samples", 14, 18)],
        b"wvpk": [("samples", 12, 16)],
        b"riff": [("file", 16, 24)],
        b"\x30\x26\xb2\x75": [("header", 16, 24)],
        b"2BIT": [("samples", 26, 30)],
    }.get(begin, [])
    found = list(fixed)
    if begin == b"caff":
        found += _caf(content)
    if begin == b"riff":  # W64: sizes follow GUIDs
        place = content.find(b"data\xf3\xac")
        found += [("data", place + 16, place + 24)] if place > 0 else []
    for mark in (b"Xing", b"Info"):
        place = content.find(mark, 0, 4096)
        if place > 0:
            found.append(("frames of Xing", place + 8, place + 12))
    if begin == b"\x1aE\xdf\xa3":
        found += _segment(content)
    if begin == b"Crea":
        found.append(("block", 27, 30))
    return found


def _riff(content: bytes, order: str) -> Iterator[Field]:
    yield "file", 4, 8
    place = 12
    while place + 8 <= len(content):
        name = content[place : place + 4]
        (size,) = struct.unpack_from(order + "I", content, place + 4)
        text = name.decode("latin-1").strip()
        yield text, place + 4, place + 8
        if name == b"ds64":
            yield "ds64 file", place + 8, place + 16
            yield "ds64 data", place + 16, place + 24
            yield "ds64 samples", place + 24, place + 32
        if name == b"COMM":
            yield "COMM samples", place + 10, place + 14
        if name in (b"data", b"SSND", b"BODY", b"LIST") and size > len(content):
            return
        place += 8 + size + size % 2


_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def _boxes(content: bytes, begin: int, end: int) -> Iterator[Field]:
    while begin + 8 <= end:
        size, name = struct.unpack_from(">I4s", content, begin)
        text = name.decode("latin-1").strip()
        yield text, begin, begin + 4
        if name in (b"mvhd", b"mdhd"):
            yield f"{text} duration", begin + 24, begin + 28
        if name == b"tkhd":
            yield "tkhd duration", begin + 28, begin + 32
        if name in (b"stsz", b"stts", b"stco", b"stsc"):
            count = begin + (16 if name == b"stsz" else 12)
            yield f"{text} count", count, count + 4
        if name in _PARENTS:
            yield from _boxes(content, begin + 8, min(begin + size, end))
        begin += max(size, 8)


def _caf(content: bytes) -> Iterator[Field]:
    place = 8
    while place + 12 <= len(content):
        name, size = struct.unpack_from(">4sq", content, place)
        yield name.decode("latin-1").strip(), place + 4, place + 12
        if name == b"pakt":
            yield "pakt packets", place + 12, place + 20
            yield "pakt samples", place + 20, place + 28
        place += 12 + max(size, 0)
        if size < 0:
            return


def _segment(content: bytes) -> Iterator[Field]:
    place = content.find(b"\x18\x53\x80\x67", 0, 200)
    if place > 0 and content[place + 4] == 1:
        # 8 bytes, whose first bit says so: 0 without the first byte, and "unknown" with all ones.
        yield "Segment", place + 5, place + 12
    place = content.find(b"\x44\x89\x88", 0, 1000)
    if place > 0:
        yield "Duration", place + 3, place + 11
