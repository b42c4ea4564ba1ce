"""Sound and video files, opened without access to anything else; samples of sound.

soundfile reads WAV, AIFF, FLAC and Ogg with a length in the header; PyAV reads all other files and,
if installed, damaged or chained Ogg. Warnings report undecodable packets, gaps, a length other than
the header's, and bytes after the end.
"""

import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError, InputError, VideoError
from qwen3_omni_neuron.prompt.media.fields import (
    Source,
    Warn,
    ignore,
    name_of,
    open_media,
    read_format,
)

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream

Section = tuple[int, NDArray[Any]]
"""Sampling rate in Hz, and samples [samples, channels], integers or floats."""
BLOCK_NUMBERS = 1 << 20  # numbers in one block: 11 s of 48 kHz stereo, 4 MiB
MOST_PACKETS = 1 << 23  # in a file: 58 hours of MP3, at 40 per second
_ERRORS: dict[str, type[InputError]] = {"audio": AudioError, "video": VideoError}
_DEMUXERS = "mp3,aac,flac,ogg,wav,mov,matroska,avi,mpegts"  # FFmpeg also reads playlists
_UNKNOWN_FRAMES = 2**63 - 1
_READ_FRAMES = 1 << 12  # samples at a time: libsndfile loses as many if it fails
_BATCH = 1 << 16
_MISSING_S = 0.1  # shorter gaps may be a codec's first and last samples
_LONGEST_S = 1e6  # an AVI written to a pipe promises more
_ID3_BYTES = 128
_TS_PACKET = 188  # bytes; packets of 192 and 204 begin otherwise
_SCANNED = 1 << 12  # bytes per step of the search for an Ogg page
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_JITTER_S = 0.01  # timestamps may be rounded, and some recorders' vary
_NAMED_STRETCHES = 5
_UNKNOWN_SIZE = 0x7FFF0000  # bytes: writers to a pipe write this or more
_HEAD, _TAIL = 1 << 16, 1 << 24  # bytes searched at a file's beginning and end
# Matroska element of 4 or 8 bytes.
_DURATION = re.compile(rb"\x44\x89(?:\x01\0{6})?[\x84\x88\x04\x08]")
# MP3 frame with the number of frames, directly before the first frame of sound.
_MP3_LENGTH = re.compile(rb"\xff[\xe2-\xfb].{11,34}(?:Xing|Info|VBRI)", re.DOTALL)
_MP3_FRAME = 1441
_NEXT_FILE = re.compile(
    rb"RIFF.{4}AVI |\0.{3}ftyp|\x1aE\xdf\xa3[\x80-\xff\x01\x40-\x7f]", re.DOTALL
)


class _ManyPacketsError(Exception):
    """More than MOST_PACKETS packets."""


class _Nameless:
    """File without a name, from which libraries would infer a format.

    Seeking before the first byte does nothing: libsndfile's callbacks would print an exception.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.read, self.tell = file.read, file.tell

    def seek(self, offset: int, whence: int = 0) -> int:
        with suppress(OSError, ValueError, OverflowError):
            self._file.seek(offset, whence)
        return self.tell()


@contextmanager
def opened(source: Source, where: str, kind: str) -> "Iterator[InputContainer]":
    """Open a file with PyAV, and close it afterwards. kind: "audio" or "video".

    Raises AudioError or VideoError, also for PyAV's errors in the block.
    """
    error, name = _ERRORS[kind], name_of(source)
    try:
        import av
    except ImportError as reason:
        instead = {
            "audio": "send WAV, AIFF, FLAC or Ogg (Vorbis, Opus)",
            "video": "give frames, with their fps",
        }[kind]
        raise error(
            f"{where} is {kind} that needs PyAV, which is not installed. "
            f"Run: pip install 'qwen3-omni-neuron[video]'; or {instead}."
        ) from reason
    # No protocol is allowed: our file object needs none.
    options = {"protocol_whitelist": "", "format_whitelist": _DEMUXERS}
    with open_media(source, where, error) as file:
        try:
            nameless: Any = _Nameless(file)
            with av.open(nameless, "r", options=options, metadata_errors="replace") as container:
                yield container
        except InputError:
            raise
        except _ManyPacketsError as reason:
            raise error(
                f"{where}: {name} has more than {MOST_PACKETS} packets. Send a part of it."
            ) from reason
        # PyAV and arithmetic with the file's numbers raise ValueError and ArithmeticError.
        except (av.FFmpegError, ValueError, ArithmeticError) as reason:
            why = getattr(reason, "strerror", None) or reason  # its str names a file "<none>"
            raise error(
                f"{where}: {name} can't be decoded as {kind}; it is damaged or truncated ({why}). "
                "Export it again."
            ) from reason


def no_decoder(where: str, source: Source, kind: str, error: type[InputError]) -> InputError:
    """Return the error for a codec without a decoder."""
    return error(
        f"{where}: FFmpeg has no decoder here for the {kind} codec of {name_of(source)}. Export it "
        "with another codec, such as H.264 or AAC."
    )


_Stream = TypeVar("_Stream", bound="Stream")


def chosen_stream(streams: Sequence[_Stream], place: str, warn: Warn) -> _Stream | None:
    """Return the default stream, else the first decodable one, else the first, else None.

    warn: called if there are several.
    """
    from av.stream import Disposition

    known = [stream for stream in streams if stream.codec_context is not None] or streams
    marked = [stream for stream in known if stream.disposition & Disposition.default]
    chosen = next(iter(marked or known), None)
    if chosen is not None and len(streams) > 1:
        kind = "the default" if marked else "the first"
        warn(
            f"{place} has {len(streams)} {chosen.type} tracks. Track {streams.index(chosen) + 1}, "
            f"{kind}, is used."
        )
    return chosen


class Packets:
    """Packets of a stream, and the losses that the file's packets show.

    failed: packets that could not be read or decoded. restarts: how often timestamps restart.
    missing: sentences about the first gaps in the sound's timestamps.
    """

    def __init__(self, container: "InputContainer", stream: "Stream"):
        self.failed = self.restarts = 0
        self._container, self._stream = container, stream
        self._begin_s, self._end_s, self._end_byte = math.inf, -math.inf, 0
        self._next_s = -math.inf
        # Time by which FFmpeg may shift edit lists' parts, and whether packets are left out.
        self._unsure_s, self._left_out, self._behind = 0.0, False, False
        self._first_s = self._heard_s = math.inf
        self.missing: list[str] = []

    def __iter__(self) -> "Iterator[Packet]":
        """Yield the packets that can be read. Raises av.FFmpegError if none can."""
        import av

        count = 0
        try:
            # PyAV raises an IndexError at the end if the header lacks a stream.
            with suppress(IndexError):
                for packet in self._container.demux():
                    if count == MOST_PACKETS:
                        raise _ManyPacketsError
                    count += 1
                    self._note(packet)
                    if packet.stream_index == self._stream.index:
                        yield packet
        except av.FFmpegError as error:
            if isinstance(error, MemoryError) or not count:
                raise
            self.failed += 1

    def _note(self, packet: "Packet") -> None:
        if packet.pos is not None:
            self._end_byte = max(self._end_byte, packet.pos + packet.size)
        # The last packet of a WAV without a size is marked as corrupt, too.
        self.failed += packet.is_corrupt and self._container.format.name != "wav"
        tick = float(packet.time_base or 0)
        duration_s = tick * (packet.duration or 0)
        if packet.pts is not None:
            self._begin_s = min(self._begin_s, tick * packet.pts)
            self._end_s = max(self._end_s, tick * packet.pts + duration_s)
        if packet.stream_index != self._stream.index:
            return
        # An edit list's part begins with decoded but hidden packets from before it.
        self._unsure_s += duration_s * (packet.is_discard and not self._left_out)
        self._left_out = packet.is_discard
        if packet.dts is not None:
            now_s = tick * packet.dts
            behind = now_s < self._next_s - duration_s - _MISSING_S
            self._behind = packet.is_discard and (behind or self._behind)
            if not packet.is_discard:
                self.restarts += behind
                self._next_s = now_s + duration_s

    def decoded(self, packet: "Packet") -> list[Any]:
        """Return the frames of a packet, none if it can't be decoded."""
        import av

        try:
            frames = packet.decode()
        except av.FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            self.failed += bool(packet.size)
            return []
        if self._stream.type == "audio":
            for frame in frames:
                self._note_sound(frame)
        return frames

    def _note_sound(self, frame: Any) -> None:
        length_s = frame.samples / frame.sample_rate
        if frame.pts is not None and frame.time_base:
            now_s = float(frame.pts * frame.time_base)
            self._first_s = min(self._first_s, now_s)
            lacking_s = now_s - self._heard_s
            if lacking_s > max(length_s / 2, _JITTER_S) and len(self.missing) < _NAMED_STRETCHES:
                at_s = self._heard_s - self._first_s
                self.missing.append(f"{lacking_s:.2f} s are missing at {at_s:.2f} s")
            self._heard_s = now_s
        self._heard_s += length_s

    def losses(self, source: Source, where: str, promised_s: float | None, found_s: float) -> str:
        """Return a sentence about the file's losses, or "".

        promised_s, found_s: lengths by the header, and of the stream.
        """
        name = self._container.format.name
        if name.startswith("matroska") and self._end_s > self._begin_s:
            found_s = self._end_s - self._begin_s  # its header has the longest stream's length
        elif name.startswith("mov") and promised_s:
            # Its header counts an empty edit before the first packet, and promises less than is
            # there if a file was cut by packets: some of the last frames are missing.
            start_s = float((self._stream.start_time or 0) * (self._stream.time_base or 0))
            found_s = min(found_s + max(0.0, start_s), promised_s)
        said = [f"{self.failed} packets can't be decoded"] if self.failed else []
        if self.restarts or self._behind:
            said.append("its timestamps restart, as in joined files")
        with open_media(source, where, AudioError) as file:
            if name == "ogg":
                said += (faults := _read_pages(file)[0])
                if faults and _MISSING_S < self._first_s < math.inf:
                    said.append(f"{self._first_s:.2f} s are missing at 0.00 s")
            said += self.missing
            if name == "mpegts" and file.read(1) == b"G" and file.seek(0, 2) % _TS_PACKET:
                said.append("its last packet is truncated")
            if name == "wav":
                left = _left_of_chunk(file)
            elif name in ("mp3", "aac"):
                left = file.seek(0, 2) - self._end_byte
            else:
                left = _left_of_next(file, self._end_byte)
        if promised_s is not None and abs(promised_s - found_s) <= _MISSING_S + self._unsure_s:
            promised_s = None
        return _losses(said, promised_s, found_s, left)


def _losses(said: list[str], promised_s: float | None, found_s: float, left: int) -> str:
    """Return a sentence about a damaged file. left: bytes after the end."""
    if promised_s is not None and abs(promised_s - found_s) > _MISSING_S:
        said.append(f"its header says {promised_s:.2f} s, but it has {found_s:.2f} s")
    if left > _ID3_BYTES:
        said.append(f"{left} bytes after its end are ignored")
    elif left < -1:
        said.append(f"its header says {-left} bytes more")
    return "; ".join(said)


def _left_of_chunk(file: BinaryIO) -> int:
    """Count the bytes after a WAV's or AIFF's end; negative for missing ones."""
    file.seek(0)
    head = file.read(8)
    said = int.from_bytes(head[4:], "little" if head.startswith(b"RIFF") else "big")
    known = head[:4] in (b"RIFF", b"RIFX", b"FORM") and 8 < said < _UNKNOWN_SIZE
    return file.seek(0, 2) - said - 8 if known else 0


def _left_of_next(file: BinaryIO, end: int) -> int:
    """Count the bytes from the start of the next file on."""
    size = file.seek(0, 2)
    file.seek(end)
    found = _NEXT_FILE.search(file.read(_TAIL))
    return size - end - found.start() if found else 0


def _read_pages(file: BinaryIO) -> tuple[list[str], bool]:
    """Return faults of an Ogg file's pages, and whether it is chained."""
    numbers: dict[bytes, int] = {}
    lost = chained = ended = begun = False
    at = 0
    while (at := _next_page(file, at)) >= 0:
        file.seek(at)
        head = file.read(27).ljust(27, b"\0")
        lacing = file.read(head[26])
        body = file.read(sum(lacing))
        # The polynomial is zlib's, with the bits of each byte reversed.
        page = (head[:22] + bytes(4) + head[26:] + lacing + body).translate(_MIRRORED)
        checksum = int.from_bytes(head[22:26].translate(_MIRRORED), "big")
        if zlib.crc32(page, 0xFFFFFFFF) ^ 0xFFFFFFFF != checksum:
            at += 1
            continue
        at += len(page)
        serial, number, first = head[14:18], int.from_bytes(head[18:22], "little"), head[5] & 2
        lost |= not first and number != numbers.get(serial)
        chained |= bool(first and begun)
        begun |= not first
        ended = bool(head[5] & 4)
        numbers[serial] = number + 1
    faults = ["pages of it are missing or damaged"] if lost else []
    return (faults if ended else [*faults, "its last page is missing"]), chained


def _next_page(file: BinaryIO, at: int) -> int:
    """Return the first page's place from `at` on, or -1."""
    file.seek(at)
    while len(scanned := file.read(_SCANNED)) > 3:
        found = scanned.find(b"OggS")
        if found >= 0:
            return at + found
        at += len(scanned) - 3
        file.seek(at)
    return -1


def promised_s(container: "InputContainer", stream: "Stream", source: Source) -> float | None:
    """Return the length in seconds that a file's header promises, or None."""
    name = container.format.name
    of_file = container.duration / 1e6 if container.duration else math.inf
    of_stream = float((stream.duration or 0) * (stream.time_base or 0)) or math.inf
    if name.startswith("mov"):
        promised = min(of_file, of_stream)  # an edit list shortens the file alone
    elif name == "ogg":
        promised = of_stream
    elif name == "avi":
        of_video = stream.type == "video"
        tick = 1 / (stream.average_rate or 1) if of_video else (stream.time_base or 0)
        promised = float(stream.frames * tick)
    elif name.startswith("matroska"):
        promised = of_file if _DURATION.search(_read(source, 0, _HEAD)) else math.inf
    elif name == "mp3":
        first = next(container.demux(stream)).pos or 0
        before = _read(source, max(0, first - _MP3_FRAME), min(first, _MP3_FRAME))
        promised = of_stream if _MP3_LENGTH.search(before) else math.inf
    else:
        promised = math.inf
    return promised if 0 < promised < _LONGEST_S else None


def _read(source: Source, at: int, count: int) -> bytes:
    with open_media(source, "", AudioError) as file:
        file.seek(at)
        return file.read(count)


@dataclass(frozen=True)
class OpenedSound:
    """Sound of a file, not yet decoded.

    rate: of the first samples, in Hz. seconds: length by the header, None if unknown. sections:
    samples, iterated once.
    """

    rate: int
    seconds: float | None
    sections: Iterator[Section]


def open_sound(source: Source, where: str, warn: Warn) -> OpenedSound:
    """Open a file of sound, or the default audio stream of a video. Raises AudioError."""
    found = read_format(source, where, "audio")
    opened = _by_soundfile(source, where, warn) if found.library == "soundfile" else None
    return opened or _by_pyav(source, where, warn)


def _by_soundfile(source: Source, where: str, warn: Warn) -> OpenedSound | None:
    """Open a file; return None unless libsndfile can, and finds an exact length."""
    import soundfile

    with open_media(source, where, AudioError) as file:
        faults, chained = _read_pages(file) if file.read(4) == b"OggS" else ([], False)
        # libsndfile would lose data after damage or a first stream.
        if find_spec("av") and (faults or chained):
            return None
        file.seek(0)
        try:
            nameless: Any = _Nameless(file)
            with soundfile.SoundFile(nameless) as audio:
                frames, rate, subtype = audio.frames, audio.samplerate, audio.subtype
        except soundfile.SoundFileError:
            return None
    if frames in (0, _UNKNOWN_FRAMES) or subtype.startswith("MPEG"):
        return None
    return OpenedSound(rate, frames / rate, _soundfile_sections(source, where, warn, faults))


def _soundfile_sections(
    source: Source, where: str, warn: Warn, faults: list[str]
) -> Iterator[Section]:
    import soundfile

    count, said = 0, list[str]()
    with open_media(source, where, AudioError) as file:
        nameless: Any = _Nameless(file)
        with soundfile.SoundFile(nameless) as audio:
            rate, promised = audio.samplerate, audio.frames / audio.samplerate
            at_once = max(1, min(_READ_FRAMES, BLOCK_NUMBERS // audio.channels))
            try:
                # Otherwise libsndfile decodes the first 0.2 s of FFmpeg's Opus wrongly.
                audio.seek(0)
                # SoundFile.blocks() repeats the last block if the file ends earlier.
                while len(block := audio.read(at_once, dtype="float32", always_2d=True)):
                    count += len(block)
                    yield rate, block
            except soundfile.SoundFileError as error:
                said.append(f"the decoder stopped ({str(error).rstrip('.')})")
            form, end = audio.format, file.tell()
        if said and not count:
            raise AudioError(f"{where}: {name_of(source)} is damaged: {said[0]}. Export it again.")
        left = file.seek(0, 2) - end if form in ("FLAC", "OGG") else _left_of_chunk(file)
    said += faults
    _warn(where, warn, _losses(said, promised, count / rate, left), count / rate)


def _warn(where: str, warn: Warn, losses: str, seconds: float) -> None:
    if losses:
        warn(f"{where}: the file is incomplete: {losses}. Its {seconds:.2f} s are used.")


def _by_pyav(source: Source, where: str, warn: Warn) -> OpenedSound:
    with opened(source, where, "audio") as container:
        promised = promised_s(container, _audio_stream(container, source, where, warn), source)
    sections = _pyav_sections(source, where, warn, promised)
    first = next(sections, None)
    if first is None:
        raise AudioError(
            f"{where}: {name_of(source)} has no sound that can be decoded. Export it again."
        )
    return OpenedSound(first[0], promised, chain([first], sections))


def _audio_stream(
    container: "InputContainer", source: Source, where: str, warn: Warn
) -> "AudioStream":
    stream = chosen_stream(container.streams.audio, f"{where}: {name_of(source)}", warn)
    if stream is None:
        others = " and ".join(sorted({stream.type for stream in container.streams}))
        raise AudioError(
            f"{where}: {name_of(source)} has no sound, only {others or 'an empty container'}. Send "
            "a recording with sound."
        )
    if stream.codec_context is None:
        raise no_decoder(where, source, "audio", AudioError)
    return stream


def _pyav_sections(
    source: Source, where: str, warn: Warn, promised: float | None
) -> Iterator[Section]:
    found, batch = 0.0, _Batch()
    with opened(source, where, "audio") as container:
        packets = Packets(container, _audio_stream(container, source, where, ignore))
        for packet in packets:
            for frame in packets.decoded(packet):
                found += frame.samples / frame.sample_rate
                yield from batch.add(frame)
        yield from batch.take()
        losses = packets.losses(source, where, promised, found)
    _warn(where, warn, losses, found)


class _Batch:
    """Joined samples of frames of one rate, type and number of channels."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._rate = self._numbers = 0

    def add(self, frame: "AudioFrame") -> Iterator[Section]:
        samples = frame_samples(frame)
        if self._parts and (frame.sample_rate, samples.shape[1], samples.dtype) != (
            *(self._rate, self._parts[0].shape[1], self._parts[0].dtype),
        ):
            yield from self.take()
        self._rate = frame.sample_rate
        self._parts.append(samples)
        self._numbers += samples.size
        if self._numbers >= _BATCH:
            yield from self.take()

    def take(self) -> Iterator[Section]:
        if self._parts:
            block = np.concatenate(self._parts)
            self._parts, self._numbers = [], 0
            yield self._rate, block


def frame_samples(frame: "AudioFrame") -> NDArray[Any]:
    """Return a frame's samples, [samples, channels]."""
    import av

    channels, planar = frame.layout.nb_channels, frame.format.is_planar
    # PyAV 18 reads a ninth plane beyond 8, and crashes.
    if planar and channels >= 8:
        (frame,) = av.AudioResampler(format="dbl").resample(frame)
        planar = False
    array: NDArray[Any] = frame.to_ndarray()
    return array.T if planar else array.reshape(-1, channels)
