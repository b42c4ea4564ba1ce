"""Format of a file by its first bytes, for errors that name it and say what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

HEAD_BYTES = 1024
TS_PACKET = 188
_HEIC = frozenset(
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
)
_STARTS: tuple[tuple[bytes, "FileKind", str], ...] = (
    (b"\xff\xd8\xff", "image", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "image", "PNG"),
    (b"GIF87a", "image", "GIF"),
    (b"GIF89a", "image", "GIF"),
    (b"II*\x00", "image", "TIFF"),
    (b"MM\x00*", "image", "TIFF"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "image", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "image", "JPEG 2000"),
    (b"icns", "image", "ICNS"),
    (b"8BPS", "image", "PSD"),
    (b"\xff\x0a", "image", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "image", "JPEG XL"),
    (b"%!PS", "document", "EPS or PostScript"),
    (b"\xc5\xd0\xd3\xc6", "document", "EPS"),
    (b"%PDF", "document", "PDF"),
    (b"\x1aE\xdf\xa3", "video", "WebM or Matroska"),
    (b"FLV\x01", "video", "FLV"),
    (b"\x00\x00\x01\xba", "video", "MPEG"),
    (b"\x00\x00\x01\xb3", "video", "MPEG"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "video", "WMV or WMA"),
    (b"fLaC", "audio", "FLAC"),
    (b"ID3", "audio", "MP3"),
    (b"caff", "audio", "CAF"),
    (b"#!AMR", "audio", "AMR"),
)
_INSIDE: Mapping[bytes, tuple["FileKind", str]] = {  # the kinds of RIFF and IFF files
    b"WEBP": ("image", "WebP"),
    b"AVI ": ("video", "AVI"),
    b"WAVE": ("audio", "WAV"),
    b"AIFF": ("audio", "AIFF"),
    b"AIFC": ("audio", "AIFF"),
}
FileKind = Literal["image", "video", "audio", "document"]


@dataclass(frozen=True)
class FileFormat:
    """Kind and name of a file's format, such as "image" and "PNG"."""

    kind: FileKind
    name: str


def file_format(head: bytes) -> FileFormat | None:
    """Return the format of a file, or None if it isn't known. head: its first HEAD_BYTES bytes."""
    for start, kind, name in _STARTS:
        if head.startswith(start):
            return FileFormat(kind, name)
    # The number of pictures in it follows, which in a TGA that begins so is 0.
    if head[:4] in (b"\x00\x00\x01\x00", b"\x00\x00\x02\x00") and head[4:6] > b"\x00\x00":
        return FileFormat("image", "ICO" if head[2] == 1 else "CUR")
    if head.startswith(b"OggS"):
        return FileFormat("video" if b"\x80theora" in head else "audio", "Ogg")
    if head[:4] in (b"RIFF", b"FORM") and head[8:12] in _INSIDE:
        return FileFormat(*_INSIDE[head[8:12]])
    if head[4:8] == b"ftyp":
        return _isobmff(head[8:12])
    if head[:1] == b"G" and head[TS_PACKET : TS_PACKET + 1] == b"G":
        return FileFormat("video", "MPEG-TS")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!")) and b"<svg" in text):
        return FileFormat("document", "SVG")
    return None


def _isobmff(brand: bytes) -> FileFormat:
    if brand in _HEIC:
        return FileFormat("image", "HEIC")
    if brand in (b"avif", b"avis"):
        return FileFormat("image", "AVIF")
    return FileFormat("audio", "M4A") if brand == b"M4A " else FileFormat("video", "MP4")
