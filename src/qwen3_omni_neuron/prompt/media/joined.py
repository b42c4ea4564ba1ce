"""Files of sound joined to one: WAV, FLAC, MP4 and others, and the links of a chained Ogg file.

A decoder reads the first of them alone, or loses samples where the next begins, so that each is
opened as a file of its own. MP3 and AAC need no such thing: they are frames, one after another.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from qwen3_omni_neuron.errors import AudioError

MOST_JOINED = 1000  # files in one: 58 hours of radio, of songs of 3.5 minutes
# What files of one kind begin with, by its first four bytes.
_HEADS = {
    b"fLaC": b"fLaC\0\0\0\x22",  # and the head of the first block, which always has this size
    b"caff": b"caff\0\1\0\0",
    b"riff": b"riff.\x91\xcf\x11\xa5\xd6(\xdb\x04\xc1\0\0",  # W64
    b"0&\xb2u": bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"),  # ASF, of WMA
    b"Crea": b"Creative Voice File\x1a",
}
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


@dataclass(frozen=True)
class Part:
    """One file of a joined one: its bytes from `start` to `end`. cut: its last page isn't whole."""

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


def find_parts(file: BinaryIO, where: str) -> list[Part]:
    """Return the files that a file of sound is joined of: usually one, the whole.

    It begins after an ID3 tag. where: name of the file in errors. Raises AudioError if there are
    more than MOST_JOINED.
    """
    end = whole(file).end
    start = _after_tag(file)
    magic, form = _read(file, start, 4), _read(file, start + 8, 4)
    reached = 0
    starts = list[int]()
    if magic == b"OggS":
        for at, begins, end_of_page in _ogg_pages(file, start):
            reached = end_of_page
            starts += [at] if begins else []
            if len(starts) > MOST_JOINED:
                break
    elif magic in _HEADS:
        starts += islice(_find(file, _HEADS[magic], start), MOST_JOINED + 1)
    elif magic in _CHUNKED and form in _CHUNKED[magic]:
        starts += islice(_chunked(file, start), MOST_JOINED + 1)
    elif _read(file, start + 4, 4) == b"ftyp":
        starts += islice(_mp4(file, start), MOST_JOINED + 1)
    if len(starts) > MOST_JOINED:
        raise AudioError(
            f"{where} is joined of more than {MOST_JOINED} files. Send them one by one."
        )
    if not starts:
        return [whole(file)]
    ends = [*starts[1:], end]
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


def _ogg_pages(file: BinaryIO, at: int) -> Iterator[tuple[int, bool, int]]:
    """Yield each page's position, whether a link begins with it, and the position of its end."""
    before = False
    while True:
        head = _read(file, at, _PAGE.size + 255)
        if len(head) < _PAGE.size:
            return
        magic, _, flags, *_, segments = _PAGE.unpack_from(head)
        if magic != b"OggS":
            following = next(_find(file, b"OggS", at), None)
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
        at += 8 + size + size % 2


def _mp4(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield where each of the joined MP4 files begins, by the sizes of their boxes."""
    while len(head := _read(file, at, 16)) > 8:
        if head[4:8] == b"ftyp":
            yield at
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # too large for 32 bits
            size = int.from_bytes(head[8:], "big")
        if size < 8:  # 0: to the end of the file
            return
        at += size


def _find(file: BinaryIO, wanted: bytes, at: int) -> Iterator[int]:
    """Yield where `wanted` is in the file, from `at` on."""
    kept = b""
    while block := _read(file, at + len(kept), _AT_ONCE):
        data = kept + block
        found = data.find(wanted)
        while found >= 0:
            yield at + found
            found = data.find(wanted, found + 1)
        kept = data[max(0, len(data) - len(wanted) + 1) :]
        at += len(data) - len(kept)


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)
