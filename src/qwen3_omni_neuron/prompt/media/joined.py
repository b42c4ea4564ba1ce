"""Files joined to one: WAV, FLAC, MP4, Matroska and others, and the links of a chained Ogg file.

A decoder reads the first of them alone, or loses samples where the next begins, so that each file
of sound is opened as its own. MP3 and AAC need no such thing: they are frames, one after another.
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from qwen3_omni_neuron.errors import AudioError, InputError

MOST_JOINED = 1000  # files in one: 58 hours of radio, of songs of 3.5 minutes
# What files of one kind begin with, by its first four bytes.
_HEADS = {
    b"fLaC": re.compile(b"fLaC\0\0\0\x22"),  # and the head of the first block, of this size always
    b"caff": re.compile(b"caff\0\1\0\0"),
    b"riff": re.compile(re.escape(b"riff.\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0")),  # W64
    b"0&\xb2u": re.compile(re.escape(bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"))),  # ASF
    b"Crea": re.compile(b"Creative Voice File\x1a"),
    b"FLV\1": re.compile(b"FLV\1[\0-\5]\0\0\0\x09\0{4}"),
    # AU: its head's size, below 2048, the samples' size, and the number of the encoding.
    b".snd": re.compile(rb"\.snd\0\0[\0-\x07].{5}\0\0\0[\x01-\x1b]", re.DOTALL),
    b"NIST": re.compile(b"NIST_1A\n   1024\n"),
    # Matroska and WebM: the size of the EBML header, and its first element with its size.
    b"\x1aE\xdf\xa3": re.compile(
        rb"\x1aE\xdf\xa3(?:[\x80-\xfe]|[\x40-\x7f].|\x01.{7})\x42[\x82-\xf7][\x80-\x88]",
        re.DOTALL,
    ),
}
_WAVE = re.compile(rb"RIFF.{4}WAVE", re.DOTALL)
_OGG = re.compile(rb"OggS")
_BOXES = frozenset(  # types of boxes in a whole MP4; what follows it may be anything
    b"ftyp styp moov moof mdat mfra free skip wide uuid sidx emsg prft meta udta pnot".split()
)
_LONGEST = 32  # bytes: no head is longer
_W64_DATA = bytes.fromhex("64617461f3acd3118cd100c04f8edb8a")  # name of the chunk of samples
_W64_HEAD = 1 << 16  # bytes: it comes early
_TAG, _APE = 128, 32  # bytes of an ID3v1 tag, and of an APE tag's head and of its foot
# Head of a page of Ogg: magic, version, flags, position, serial, number, CRC, segments.
_PAGE = struct.Struct("<4sBBqIIIB")
_CHUNKED = {
    b"RIFF": (b"WAVE", b"AVI "),
    b"RIFX": (b"WAVE",),
    b"FORM": (b"AIFF", b"AIFC", b"8SVX", b"16SV"),
}
_ORDERS = {b"RIFF": "<", b"RIFX": ">", b"FORM": ">"}
_BEGINS = 2  # flag of the first page of a logical stream of Ogg
_AT_ONCE = 1 << 16  # bytes read at a time
UNKNOWN_SIZE = 0x7FFF0000  # bytes: this and more is what writers to a pipe say, that can't know it


@dataclass(frozen=True)
class Part:
    """One file of a joined one: its bytes from `start` to `end`.

    cut: its last page of Ogg, or box of MP4, isn't whole.
    """

    start: int
    end: int
    cut: bool = False


class FileView:
    """Bytes of a file as a file of its own, without its name.

    A decoder finds the format from the content alone. A seek to before the first byte leaves the
    position as it is, because libsndfile's callbacks would print an exception.
    """

    def __init__(self, file: BinaryIO, part: Part):
        self._file, self._start, self._size = file, part.start, part.end - part.start
        file.seek(part.start)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer at the end."""
        left = max(0, self._size - self.tell())
        return self._file.read(left if size < 0 else min(size, left))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position; return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        if base + offset >= 0:
            self._file.seek(self._start + base + offset)
        return self.tell()

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell() - self._start


def whole(file: BinaryIO) -> Part:
    """Return a file as the only part."""
    return Part(0, file.seek(0, os.SEEK_END))


def find_parts(file: BinaryIO, where: str, error: type[InputError] = AudioError) -> list[Part]:
    """Return the files that a file is joined of: usually one, the whole.

    It begins after an ID3 tag, and ends before one. where: name of the file in errors. Raises
    `error` if there are more than MOST_JOINED.
    """
    end = _before_tags(file)
    start = _after_tag(file)
    magic, form = _read(file, start, 4), _read(file, start + 8, 4)
    reached = 0
    starts = list[int]()
    is_mp4 = _read(file, start + 4, 4) == b"ftyp"
    if magic == b"OggS" or is_mp4:
        walk = _boxes if is_mp4 else _ogg_pages
        for at, begins, end_of_it in walk(file, start):
            reached = end_of_it
            starts += [at] if begins else []
            if len(starts) > MOST_JOINED:
                break
    elif magic in _HEADS:
        starts += islice(_find(file, _HEADS[magic], start), MOST_JOINED + 1)
    elif magic in _CHUNKED and form in _CHUNKED[magic]:
        starts += islice(_chunked(file, start), MOST_JOINED + 1)
    if len(starts) > MOST_JOINED:
        raise error(f"{where} is joined of more than {MOST_JOINED} files. Send them one by one.")
    if not starts:
        return [Part(0, end)]
    ends = [*starts[1:], end]
    if magic in (b"riff", b".snd"):
        # libsndfile would go on to the file's end.
        ends = [
            min(end, _end_of_samples(file, start) or end)
            for start, end in zip(starts, ends, strict=True)
        ]
    return [Part(a, b, b == end < reached) for a, b in zip(starts, ends, strict=True)]


def _after_tag(file: BinaryIO) -> int:
    """Return where the file begins after an ID3v2 tag."""
    head = _read(file, 0, 10)
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = 0
    for byte in head[6:]:  # seven bits in each
        size = size << 7 | byte & 0x7F
    return 10 + size


def _before_tags(file: BinaryIO) -> int:
    """Return where the file ends before the ID3v1 and APE tags that follow it."""
    end = whole(file).end
    if _read(file, max(0, end - _TAG), 3) == b"TAG":
        end -= _TAG
    foot = _read(file, max(0, end - _APE), _APE)
    if foot.startswith(b"APETAGEX"):
        size, _, flags = struct.unpack_from("<III", foot, 12)
        size += _APE * (flags >> 31)  # add the head, which the size leaves out
        end -= size if size < end else 0
    return end


def _end_of_samples(file: BinaryIO, start: int) -> int | None:
    """Return where the samples of a W64 or AU end by its header; None if it doesn't say."""
    head = _read(file, start, _W64_HEAD)
    if head.startswith(b".snd"):
        offset, size = struct.unpack_from(">II", head.ljust(12, b"\0"), 4)
        return start + offset + size if 0 < size < UNKNOWN_SIZE else None
    at = head.find(_W64_DATA)
    size = int.from_bytes(head[at + 16 : at + 24], "little")  # with the 24 bytes of its head
    return start + at + size if at > 0 and size > 24 else None


def _ogg_pages(file: BinaryIO, at: int) -> Iterator[tuple[int, bool, int]]:
    """Yield each page's position, whether a link begins with it, and the position of its end."""
    before = False
    while True:
        head = _read(file, at, _PAGE.size + 255)
        if len(head) < _PAGE.size:
            return
        magic, _, flags, *_, segments = _PAGE.unpack_from(head)
        if magic != b"OggS":
            following = next(_find(file, _OGG, at), None)
            if following is None:
                return
            at = following
            continue
        sizes = head[_PAGE.size : _PAGE.size + segments]
        end = at + _PAGE.size + segments + sum(sizes)
        first = bool(flags & _BEGINS)
        yield at, first and not before, end  # each stream of a link begins, before any goes on
        before, at = first, end


def _chunked(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield where each of the joined WAV, AVI or AIFF files begins, by their sizes."""
    while True:
        head = _read(file, at, 12)
        order = _ORDERS.get(head[:4])
        if order is None or head[8:] not in _CHUNKED[head[:4]]:
            return
        yield at
        (size,) = struct.unpack_from(order + "I", head, 4)
        if head[8:] == b"WAVE" and (not size or size >= UNKNOWN_SIZE):
            following = next(_find(file, _WAVE, at + len(head)), None)
            if following is None:
                return
            at = following
            continue
        at += 8 + size + size % 2


def _boxes(file: BinaryIO, at: int) -> Iterator[tuple[int, bool, int]]:
    """Yield each box's position in an MP4, whether a file begins with it, and where it ends."""
    while len(head := _read(file, at, 16)) > 8 and head[4:8] in _BOXES:
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # too large for 32 bits
            size = int.from_bytes(head[8:], "big")
        yield at, head[4:8] == b"ftyp", at + size
        if size < 8:  # 0: to the end of the file
            return
        at += size


def _find(file: BinaryIO, wanted: "re.Pattern[bytes]", at: int) -> Iterator[int]:
    """Yield where `wanted`, of _LONGEST bytes at most, is in the file, from `at` on."""
    while data := _read(file, at, _AT_ONCE + _LONGEST):
        starts = (found.start() for found in wanted.finditer(data))
        yield from (at + start for start in starts if start < _AT_ONCE)
        at += _AT_ONCE


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)
