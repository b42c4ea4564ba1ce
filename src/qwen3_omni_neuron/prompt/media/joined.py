"""Files joined to one: WAV, FLAC, MP4, Matroska and others, and the links of a chained Ogg file.

A decoder reads the first of them alone, or loses samples where the next begins, so that each file
of sound is opened as its own. MP3 and AAC need no such thing: they are frames, one after another.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, Literal

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
    b"nut/": re.compile(b"nut/multimedia container\0"),
    b".RMF": re.compile(rb"\.RMF\0\0\0\x12\0[\0\1]"),  # the size of its first block
    b"DKIF": re.compile(rb"DKIF\0\0\x20\0"),  # IVF: version, and the head's size
    b"\x89PNG": re.compile(rb"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
    b"\xb7\xd8\0\x20": re.compile(re.escape(bytes.fromhex("b7d800203749da11a64e0007e95ead8d"))),
    # MXF: the key of the partition of a header.
    b"\x06\x0e\x2b\x34": re.compile(re.escape(bytes.fromhex("060e2b34020501010d0102010102"))),
    # AVR: whether of two channels, 8 or 16 bits, whether signed.
    b"2BIT": re.compile(rb"2BIT.{8}(?:\0\0|\xff\xff)\0[\x08\x10](?:\0\0|\xff\xff)", re.DOTALL),
    # IRCAM of both orders of bytes: rate, number of channels, encoding.
    **dict.fromkeys(
        (b"d\xa3\1\0", b"d\xa3\2\0", b"d\xa3\3\0", b"d\xa3\4\0"),
        re.compile(rb"d\xa3[\x01-\x04]\0.{4}[\x01-\xff]\0\0\0.\0[\0-\x04]\0", re.DOTALL),
    ),
    **dict.fromkeys(
        (b"\0\1\xa3d", b"\0\2\xa3d", b"\0\3\xa3d", b"\0\4\xa3d"),
        re.compile(rb"\0[\x01-\x04]\xa3d.{4}\0\0\0[\x01-\xff]\0[\0-\x04]\0.", re.DOTALL),
    ),
    b"MATL": re.compile(b"MATLAB 5\\.0 MAT-file"),
    # MAT4 of both orders of bytes, as libsndfile begins it.
    b"\0\0\0\0": re.compile(rb"\0{4}\x01\0\0\0\x01\0{7}\x0b\0\0\0samplerate\0"),
    b"\0\0\3\xe8": re.compile(rb"\0\0\x03\xe8\0\0\0\x01\0\0\0\x01\0{7}\x0bsamplerate\0"),
    # PAF of both: format, order, rate, encoding, number of channels.
    b" paf": re.compile(rb" paf\0{8}.{4}\0\0\0[\0-\x02]\0\0\0[\x01-\xff]", re.DOTALL),
    b"fap ": re.compile(rb"fap \0{4}[\0\x01]\0\0\0.{4}[\0-\x02]\0\0\0[\x01-\xff]\0\0\0", re.DOTALL),
    b"PVF1": re.compile(rb"PVF1\n\d{1,4} \d{1,7} (?:8|16|32)\n"),
    # SDS: its first message, whose bytes have 7 bits, from its number of bits to its end.
    b"\xf0\x7e\0\1": re.compile(rb"\xf0\x7e\0\x01[\0-\x7f]{2}[\x08-\x1c][\0-\x7f]{13}\xf7"),
    b"Exte": re.compile(b"Extended Instrument: "),  # XI
    b"ALaw": re.compile(rb"ALawSoundFile\*\*\0"),  # WVE
    # WV: block 0, the first of its channels.
    b"wvpk": re.compile(
        rb"wvpk.{4}[\x02-\x10]\x04.{6}\0{4}.{5}[\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f"
        rb"\x58-\x5f\x68-\x6f\x78-\x7f\x88-\x8f\x98-\x9f\xa8-\xaf\xb8-\xbf\xc8-\xcf\xd8-\xdf"
        rb"\xe8-\xef\xf8-\xff]",
        re.DOTALL,
    ),
    # TTA: its format, and numbers of channels and of bits.
    b"TTA1": re.compile(rb"TTA1[\x01-\x03]\0[\x01-\xff]\0[\x08\x10\x18\x20]\0"),
    # Matroska and WebM: the size of the EBML header, and its first element with its size.
    b"\x1aE\xdf\xa3": re.compile(
        rb"\x1aE\xdf\xa3(?:[\x80-\xfe]|[\x40-\x7f].|\x01.{7})\x42[\x82-\xf7][\x80-\x88]",
        re.DOTALL,
    ),
}
# Files whose header has no size, as those written to a pipe.
_WAVE = re.compile(rb"(?:RIFF|RF64).{4}WAVE", re.DOTALL)
_AIFF = re.compile(rb"FORM.{4}AIF[FC]", re.DOTALL)
# Head of the first page of a stream of Ogg, all of one packet, and that of any page.
_FIRST_PAGE = re.compile(rb"OggS\0[\x02\x03\x06\x07]\0{8}.{12}\x01.", re.DOTALL)
_PAGE = re.compile(rb"OggS\0[\0-\x07]")
_PAGE_HEAD, _PAGE_BYTES = 27, 27 + 255 + 255 * 255  # with its number of segments; at most
_MOST_STREAMS = 4  # streams in each file of Ogg, on average
_BOXES = frozenset(  # types of boxes in a whole MP4; what follows it may be anything
    b"ftyp styp moov moof mdat mfra free skip wide uuid sidx emsg prft meta udta pnot".split()
)
_LONGEST = 32  # bytes: no head is longer
_W64_DATA = bytes.fromhex("64617461f3acd3118cd100c04f8edb8a")  # name of the chunk of samples
_W64_HEAD = 1 << 16  # bytes: it comes early
_TAG, _APE = 128, 32  # bytes of an ID3v1 tag, and of an APE tag's head and of its foot
_MOST_TAGS = 16  # ID3v2 tags that may follow one another at the beginning of a file
_MOST_BOXES = 500_000  # boxes in an MP4: 2.7 hours in fragments of one frame, at 25 a second
# Order of the bytes of numbers, and forms that are sound or video.
_CHUNKED: "dict[bytes, tuple[Literal['little', 'big'], tuple[bytes, ...]]]" = {
    b"RIFF": ("little", (b"WAVE", b"AVI ")),
    b"RF64": ("little", (b"WAVE",)),
    b"RIFX": ("big", (b"WAVE",)),
    b"FORM": ("big", (b"AIFF", b"AIFC", b"8SVX", b"16SV")),
}
_AT_ONCE = 1 << 16  # bytes read at a time
_MOST_BYTES = 1 << 40  # size of a file
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

    It begins after ID3 tags, and ends before one. where: name of the file in errors. Raises
    `error` if there are more than MOST_JOINED.
    """
    end = _before_tags(file)
    start = after_tags(file)
    magic = _read(file, start, 4)
    reached = 0
    found: Iterable[int] = ()
    if magic == b"OggS":
        found, reached = _links(file, start), _end_of_pages(file, start, end)
    elif _read(file, start + 4, 4) == b"ftyp":
        found, reached = _mp4_files(file, start, where, error)
    elif magic in _HEADS:
        found = _find(file, _HEADS[magic], start)
    elif magic in _CHUNKED:
        found = _chunked(file, start)
    elif magic.startswith(b"FWS"):
        found = _flash(file, start)
    starts = list(islice(found, MOST_JOINED + 1))
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


def after_tags(file: BinaryIO | FileView) -> int:
    """Return where the file begins after its ID3v2 tags."""
    at = 0
    for _ in range(_MOST_TAGS):
        head = _read(file, at, 10)
        if head[:3] != b"ID3" or len(head) < 10:
            break
        size = 0
        for byte in head[6:]:  # seven bits in each
            size = size << 7 | byte & 0x7F
        at += 10 + size
        if head[3] == 4 and head[5] & 0x10:  # a footer, which the size leaves out
            at += 10
    return at


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


def _links(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield where each link of a chained Ogg begins, by the first pages of its streams."""
    after = -1
    first_pages = _find(file, _FIRST_PAGE, at)
    for page in islice(first_pages, _MOST_STREAMS * (MOST_JOINED + 1)):
        if page != after:  # each stream of a link begins, before any goes on
            yield page
        after = page + _PAGE_HEAD + 1 + _read(file, page + _PAGE_HEAD, 1)[0]


def _end_of_pages(file: BinaryIO, start: int, end: int) -> int:
    """Return where the last page of an Ogg file ends, or would if it were whole."""
    begin = max(start, end - _PAGE_BYTES)
    tail = _read(file, begin, end - begin)
    pages = [found.start() for found in _PAGE.finditer(tail)]
    if not pages:
        return 0
    table = tail[pages[-1] + _PAGE_HEAD - 1 :]  # number of segments, and their sizes
    if not table or len(table) <= table[0]:
        return end + 1
    return begin + pages[-1] + _PAGE_HEAD + sum(table[: 1 + table[0]])


def _chunked(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield where each of the joined WAV, AVI or AIFF files begins, by their sizes."""
    while True:
        head = _read(file, at, _LONGEST)
        magic, form = head[:4], head[8:12]
        if magic not in _CHUNKED or form not in _CHUNKED[magic][1]:
            return
        yield at
        # RF64 has its size of 64 bits in its first chunk.
        size = int.from_bytes(head[20:28] if magic == b"RF64" else head[4:8], _CHUNKED[magic][0])
        unknown = _MOST_BYTES if magic == b"RF64" else UNKNOWN_SIZE
        if not size or size >= unknown:
            wanted = _AIFF if magic == b"FORM" else _WAVE
            following = next(_find(file, wanted, at + 12), None)
            if following is None:
                return
            at = following
            continue
        at += 8 + size + size % 2


def _flash(file: BinaryIO, at: int) -> Iterator[int]:
    """Yield where each of the joined SWF files begins, by their sizes."""
    while len(head := _read(file, at, 8)) == 8 and head.startswith(b"FWS"):
        yield at
        at += max(8, int.from_bytes(head[4:], "little"))


def _mp4_files(
    file: BinaryIO, at: int, where: str, error: type[InputError]
) -> tuple[list[int], int]:
    """Return where each of the joined MP4 files begins, and where the last box ends or would."""
    starts, end = list[int](), 0
    for count, (box, begins, end_of_it) in enumerate(_boxes(file, at)):
        starts += [box] if begins else []
        end = end_of_it
        if count == _MOST_BOXES:
            raise error(f"{where} is an MP4 of more than {_MOST_BOXES} boxes. Export it again.")
    return starts, end


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


def _read(file: BinaryIO | FileView, at: int, count: int) -> bytes:
    if at >= _MOST_BYTES:  # where a size says so; systems refuse to go there
        return b""
    file.seek(at)
    return file.read(count)
