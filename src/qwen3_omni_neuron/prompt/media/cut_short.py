"""Signs that a file is cut short: a length that its header promises, and an end that it lacks."""

import re
from typing import TYPE_CHECKING, Literal

from qwen3_omni_neuron.prompt.media.joined import UNKNOWN_SIZE, FileView, after_tags
from qwen3_omni_neuron.prompt.media.magic import TS_PACKET

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

# FFmpeg's formats whose header has the length of a stream, or else of the file. FFmpeg guesses the
# length of other files from their size and bit rate, or reads it from their end.
_SAY_STREAM = frozenset(
    (
        *("mov", "flac", "w64", "caf", "aiff", "au", "tta", "wv", "ape", "nistsphere"),
        *("mxf", "mxf_opatom", "rm", "ivf"),
    )
)
_SAY_FILE = frozenset(("matroska", "flv"))
# Formats whose header has the size in bytes. _SIZES: how many bytes it leaves out.
BY_SIZE = frozenset(("avi", "wav", "asf", "swf", "aiff", "mmf"))
_SIZES: "tuple[tuple[bytes, Literal['little', 'big'], int], ...]" = (
    (b"RIFF", "little", 8),
    (b"FORM", "big", 8),
    (b"MMMD", "big", 8),
    (b"FWS", "little", 0),
)
# What FFmpeg writes to a pipe for the length that it can't know: frames of AVI, ticks of IVF and of
# RM, and bytes of SWF.
_UNKNOWN_FRAMES, _UNKNOWN_TICKS, _UNKNOWN_SWF = 1 << 30, (0xFFFFFFFF, 3_600_000), 100 << 20
_EBML = b"\x1aE\xdf\xa3"
# Element of Matroska, of 4 or 8 bytes.
_DURATION = re.compile(rb"\x44\x89(?:\x01\0{6})?[\x84\x88\x04\x08]")
# Formats of which all is packets: nothing follows the last one.
_ENDS_WITH_PACKET = frozenset(("yuv4mpegpipe", "roq", "obu"))
_END_MARKERS = {"mjpeg": b"\xff\xd9", "sds": b"\xf7", "swf": b"\0\0"}
_END_MARKER_BYTES = 64  # at most: SMJPEG ends with "DONE", multipart MJPEG with its boundary
_ASF_SIZE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")  # name of the object of the size
_HEAD = 1 << 16  # bytes: the object comes early
# Position of a Xing header in an MP3's first frame, in bytes, by whether it is of MPEG 1 and
# whether of one channel: after the frame's head of 4 bytes and the side information.
_XING_AT = {(True, False): 36, (True, True): 21, (False, False): 21, (False, True): 13}
_VBRI_AT = 36  # bytes, in all of them
_MPEG_HEAD = 64  # bytes of a frame: either header has its number of frames in these
MISSING_S = 0.1  # less than this may be a codec's first and last samples
_TAIL = 1 << 17  # bytes: an Ogg page has 64 KiB at most
_NUT_INDEX = bytes.fromhex("4e58dd672f23e64e")
# Keys of the last partition of an MXF, and of the list of partitions that may follow.
_MXF_ENDS = tuple(bytes.fromhex("060e2b34020501010d01020101" + kind) for kind in ("04", "11"))
# Head of a pack of MPEG-PS, of version 2 or 1.
_PACK = re.compile(rb"\0\0\x01\xba(?:[\x40-\x7f].{9}|[\x20-\x2f].{7})", re.DOTALL)


def cut_short(where: str, promised: float | None, found: float) -> str:
    """Return the warning about a file that is cut short. promised, found: lengths in seconds."""
    if promised is None:
        return (
            f"{where}: the file is cut short: its last packet is not whole. The {found:.2f} s that "
            "can be decoded are used."
        )
    return (
        f"{where}: the file is cut short: of {promised:.2f} s that its header promises {found:.2f} "
        "s are there. They are used."
    )


def promised_s(
    container: "InputContainer",
    stream: "AudioStream | VideoStream",
    view: FileView,
    there_s: float,
    span_s: float,
    least: float = 0.0,
) -> float | None:
    """Return the length that a header promises; None if it has none, or the file keeps it.

    there_s: length of the stream's packets; span_s: length of the packets of all streams. least:
    smallest share of the length that must be missing.
    """
    name = container.format.name.split(",")[0]
    promised = 0.0
    if name in _SAY_STREAM and stream.duration and stream.time_base:
        known = name not in ("ivf", "rm") or stream.duration not in _UNKNOWN_TICKS
        promised = known * float(stream.duration * stream.time_base)
    elif name == "avi" and stream.type == "video" and stream.average_rate:
        known = stream.frames < _UNKNOWN_FRAMES
        promised = known * float(stream.frames / stream.average_rate)
    elif name in _SAY_FILE and container.duration and _has_duration(view):
        promised, there_s = container.duration / 1e6, span_s
    return promised if promised - there_s > max(MISSING_S, promised * least) else None


def _has_duration(view: FileView) -> bool:
    """Return whether a file isn't a Matroska without a length, which FFmpeg would guess."""
    view.seek(0)
    head = view.read(_HEAD)
    return not head.startswith(_EBML) or _DURATION.search(head) is not None


def promised_by_size(view: FileView, size: int, there_s: float) -> float | None:
    """Return the length that a file promises by its size, or None if all is there."""
    said = promised_bytes(view)
    return there_s * said / size if size < said else None


def promised_bytes(view: FileView) -> int:
    """Return the size that the head of a file promises; 0 if it doesn't."""
    view.seek(0)
    head = view.read(_HEAD)
    said = 0
    for magic, order, more in _SIZES:
        if head.startswith(magic):
            said = more + int.from_bytes(head[4:8], order)
    at = head.find(_ASF_SIZE)
    if at >= 0:
        said = int.from_bytes(head[at + 40 : at + 48], "little")
    return said if said < UNKNOWN_SIZE and said != _UNKNOWN_SWF else 0


def promised_by_frames(
    view: FileView, first_byte: int, packets: int, there_s: float
) -> float | None:
    """Return the length that an MP3's first frame promises, or None if all is there.

    first_byte: position of the frame that follows it. packets: their number, of there_s together.
    """
    start = after_tags(view)
    view.seek(start)
    head = view.read(max(0, min(first_byte - start, _MPEG_HEAD)))
    if len(head) < _MPEG_HEAD or head[0] != 0xFF or head[1] < 0xE0 or not packets:
        return None
    xing = head[_XING_AT[head[1] & 0x18 == 0x18, head[3] & 0xC0 == 0xC0] :]
    vbri = head[_VBRI_AT:]
    if xing.startswith((b"Xing", b"Info")) and xing[7] & 1:  # the flag of this number
        frames = int.from_bytes(xing[8:12], "big")
    elif vbri.startswith(b"VBRI"):
        frames = int.from_bytes(vbri[14:18], "big")
    else:
        return None
    promised = frames * there_s / packets
    return promised if there_s < promised - MISSING_S else None


def lacks_its_end(view: FileView, size: int, name: str, end_byte: int) -> bool:
    """Return whether a file lacks the end that files of its format have.

    size: bytes of the file. name: FFmpeg's name of the format. end_byte: where its last packet
    ends.
    """
    view.seek(max(0, size - _TAIL))
    tail = view.read()
    match name:
        case "asf" | "swf":
            return size < promised_bytes(view) or not tail.endswith(_END_MARKERS.get(name, b""))
        case "dv":
            return end_byte != size  # FFmpeg fills up the last frame
        case "mpegts":
            view.seek(TS_PACKET)  # there are others of 192 and 204 bytes
            return view.read(1) == b"G" and size % TS_PACKET != 0
        case "mpeg":
            return _pack_is_torn(tail)
        case "gif":
            return b";" not in tail[-2:]  # some have a zero after it
        case "apng" | "png_pipe":
            return b"IEND" not in tail[-12:]
        case "mjpeg" | "sds":
            return not tail.rstrip(b"\0").endswith(_END_MARKERS[name])
        case "ogg":
            page = tail.rfind(b"OggS")
            return page < 0 or not tail[page + 5 : page + 6] > b"\x03"  # bit 2: the last page
        case "nut":
            view.seek(max(0, size - int.from_bytes(tail[-12:-4], "big")))
            return view.read(len(_NUT_INDEX)) != _NUT_INDEX
        case "mxf":
            return not any(key in tail for key in _MXF_ENDS)
        case "smjpeg" | "mpjpeg":
            return size - end_byte > _END_MARKER_BYTES
    return name in _ENDS_WITH_PACKET and 0 < end_byte < size


def _pack_is_torn(tail: bytes) -> bool:
    """Return whether the last packet of MPEG-PS is longer than the file."""
    packs = list(_PACK.finditer(tail))
    if not packs:
        return False
    at = packs[-1].end()
    if tail[packs[-1].start() + 4] & 0x40:  # the pack is of version 2
        at += tail[at - 1] & 7
    while tail[at : at + 3] == b"\0\0\1" and tail[at + 3 : at + 4] not in (b"\xb9", b"\xba"):
        at += 6 + int.from_bytes(tail[at + 4 : at + 6], "big")
    return at > len(tail)
