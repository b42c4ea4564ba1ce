"""Files with streams, decoded by PyAV without access to anything else; their audio.

A file is read twice: first its packets, without decoding, for the length, which many headers don't
have; then its samples. What can't be decoded of it is left out, with a warning.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError, InputError, VideoError
from qwen3_omni_neuron.prompt.media.cut_short import (
    BY_SIZE,
    MISSING_S,
    cut_short,
    lacks_its_end,
    promised_by_frames,
    promised_by_size,
    promised_s,
)
from qwen3_omni_neuron.prompt.media.fields import Source, Warn, name_of, open_media
from qwen3_omni_neuron.prompt.media.joined import FileView, Part

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

Section = tuple[int, NDArray[Any]]
"""Sampling rate in Hz, and samples [samples, channels] of the range of their type."""
SOUND_NAMES = (
    "WAV, AIFF, AU, CAF, FLAC, Ogg (Vorbis, Opus, FLAC, Speex), MP3, AAC, AC-3, AMR, WMA, WebM, "
    "Matroska, MP4, M4A, AVI and MPEG-TS"
)
_ERRORS: dict[str, type[InputError]] = {"audio": AudioError, "video": VideoError}
WITHOUT_PYAV = "WAV, AIFF, AU, CAF, FLAC, or Ogg (Vorbis, Opus)"
MOST_PACKETS = 1 << 23  # in a file: 58 hours of MP3, which has 40 a second
_BARE = frozenset(("mp3", "aac", "ac3", "eac3"))  # frames, one after another, without a header
_W64_UNIT = 8  # bytes
_PICTURES = ("_pipe", "image2", "gif", "ico")  # ends of the names of FFmpeg's formats of pictures
_BATCH = 1 << 16  # numbers joined to one block; a frame of MP3 has 1,152


class _ManyPacketsError(Exception):
    """A file has more than MOST_PACKETS packets."""


@contextmanager
def opened(source: Source, where: str, kind: str, part: Part) -> "Iterator[InputContainer]":
    """Open a file with PyAV, and close it afterwards.

    kind: what is wanted of it, "audio" or "video". part: the file in a joined one.
    Raises AudioError or VideoError, which begins with `where`, when PyAV is not installed or the
    file can't be opened, and inside the context for PyAV's errors and for too many packets.
    """
    error = _ERRORS[kind]
    try:
        import av
    except ImportError as reason:
        what, instead = {
            "audio": ("sound that only PyAV decodes, if it is sound", f"send {WITHOUT_PYAV}"),
            "video": ("video in a file that PyAV decodes", "give frames, with their fps"),
        }[kind]
        raise error(
            f"{where} is {what}, and it isn't installed. "
            f"Run: pip install 'qwen3-omni-neuron[video]'; or {instead}."
        ) from reason
    # FFmpeg also reads playlists, which name other files, on this machine or another. With no
    # protocol allowed it can't open those; the file object that we opened needs none.
    options = {"protocol_whitelist": ""}
    with open_media(source, where, error) as file:
        view = FileView(file, part)
        try:
            with av.open(view, "r", options=options, metadata_errors="replace") as container:
                yield container
        except InputError:
            raise
        except _ManyPacketsError as reason:
            raise error(
                f"{where}: {name_of(source)} has more than {MOST_PACKETS} packets. Send a part of "
                "it."
            ) from reason
        # ValueError and ArithmeticError come from PyAV, and from arithmetic with the file's
        # numbers.
        except (av.FFmpegError, ValueError, ArithmeticError) as reason:
            why = getattr(reason, "strerror", None) or reason  # its str names a file "<none>"
            read, instead = {
                "audio": ("read as audio", f"Export it again. {SOUND_NAMES} can be read."),
                "video": ("decoded as video", "Export it again."),
            }[kind]
            raise error(
                f"{where}: {name_of(source)} can't be {read}; it is something else, broken or cut "
                f"short ({why}). {instead}"
            ) from reason


def no_decoder(where: str, source: Source, kind: str, error: type[InputError]) -> InputError:
    """Return the error for a stream whose codec can't be decoded. kind: "audio" or "video"."""
    return error(
        f"{where}: the {kind} of {name_of(source)} is of a codec that FFmpeg has no decoder for "
        "here. Export it with another one, such as H.264 and AAC."
    )


@dataclass(frozen=True)
class OpenedSound:
    """Sound of a file, not yet decoded.

    rate: sampling rate of its first samples in Hz. seconds: length by its headers or packets, which
    may have some samples that the file says to leave out, and need not tell the truth. sections:
    its samples; can be iterated once, and raises AudioError.
    """

    rate: int
    seconds: float
    sections: Iterator[Section]


def open_contained(source: Source, where: str, part: Part, warn: Warn) -> OpenedSound:
    """Open a file's first audio stream. part: the file in a joined one.

    warn: called at the end of the samples if the file is cut short or damaged.
    Raises AudioError when it can't be opened, or has no audio that can be decoded.
    """
    with opened(source, where, "audio", part) as container:
        stream = _audio_stream(container, source, where)
        found = _measure(container, stream)
        if not found.packets and not stream.duration and stream.rate:  # as a WAV without samples
            return OpenedSound(stream.rate, 0.0, iter(()))
        if found.rate is None:
            raise AudioError(
                f"{where}: {name_of(source)} has no sound that can be decoded. Export it again."
            )
        name = container.format.name
        size = part.end - part.start
        with open_media(source, where, AudioError) as file:
            view = FileView(file, part)
            promised = promised_s(container, stream, view, found.seconds, found.span)
            if name in BY_SIZE and promised is None:
                promised = promised_by_size(view, size, found.seconds)
            if name in _BARE:
                promised = promised_by_frames(view, found.first, found.packets, found.seconds)
                part = replace(part, cut=found.ends_short)
            elif name != "ogg":  # whose pages were looked at; the last one of a stream may lack
                torn = lacks_its_end(view, size, name, found.end_byte)
                part = replace(part, cut=part.cut or torn)
    sections = _sections(source, where, part, warn, promised)
    return OpenedSound(found.rate, found.seconds, sections)


def _audio_stream(container: "InputContainer", source: Source, where: str) -> "AudioStream":
    if not container.streams.audio:
        raise AudioError(
            f"{where}: {name_of(source)} can't be read as audio: it has {_others(container)}. Send "
            "a recording with sound."
        )
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise no_decoder(where, source, "audio", AudioError)
    return stream


def _others(container: "InputContainer") -> str:
    """Return what a file without audio has."""
    from av.stream import Disposition

    if container.format.name.endswith(_PICTURES):
        return "a picture alone"
    cover = Disposition.attached_pic
    kinds = {"a cover" if s.disposition & cover else s.type for s in container.streams}
    return f"{' and '.join(sorted(kinds))} alone" if kinds else "no streams"


@dataclass(frozen=True)
class _StreamSizes:
    """Sizes and times of a file's packets.

    rate: sampling rate of the first samples, None if no packet can be decoded; a header may have
    half of it, as the header of HE-AAC does. seconds: length of the stream. span: seconds from the
    first to the last packet of all streams. packets: number of the stream's packets. first:
    position of its first packet in the file. end_byte: position where the last packet of all
    streams ends. ends_short: the last packet is smaller than the others, whose sizes differ by two
    bytes at most.
    """

    rate: int | None
    seconds: float
    span: float
    packets: int
    first: int
    end_byte: int
    ends_short: bool


def _measure(container: "InputContainer", stream: "AudioStream") -> _StreamSizes:
    rate: int | None = None
    tick = stream.time_base or Fraction(1)
    ticks, untimed, bounds = 0, False, (math.inf, -math.inf)
    count, first, last, begin, end, end_byte = 0, 0, 0, 0.0, 0.0, 0
    least, most = math.inf, 0.0
    for packet in packets(container, None):
        if not packet.size:
            continue
        if packet.pos is not None:
            end_byte = max(end_byte, packet.pos + packet.size)
        if packet.pts is not None and packet.time_base:
            begin = min(begin, float(packet.pts * packet.time_base))
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index != stream.index:
            continue
        if count:
            least, most = min(least, last), max(most, last)
        else:
            first = packet.pos or 0
        count, last = count + 1, packet.size
        if rate is None:
            rate = next((frame.sample_rate for frame in decoded(packet) or ()), None)
        ticks += max(0, packet.duration or 0)
        untimed |= not packet.duration
        if packet.pts is not None:
            bounds = min(bounds[0], packet.pts), max(bounds[1], packet.pts)
    if untimed and count:
        ticks = max(ticks, int(max(0, bounds[1] - bounds[0])))
    short = most <= least + 2 and last < least
    seconds, short = float(ticks * tick), short and count > 1
    return _StreamSizes(rate, seconds, end - begin, count, first, end_byte, short)


def packets(
    container: "InputContainer", stream: "AudioStream | VideoStream | None"
) -> "Iterator[Packet]":
    """Yield the packets of a stream, or of all, as far as they can be read."""
    import av

    count = 0
    try:
        for packet in demuxed(container, stream):
            yield packet
            count += 1
    except av.FFmpegError as error:
        if isinstance(error, MemoryError) or not count:
            raise


def demuxed(
    container: "InputContainer", stream: "AudioStream | VideoStream | None"
) -> "Iterator[Packet]":
    """Yield the packets of a stream, or of all. Raises av.FFmpegError where one can't be read.

    Raises an error that `opened` tells where there are more than MOST_PACKETS.
    """
    # PyAV raises it at a file's end if a stream has begun that the file's beginning doesn't name.
    with suppress(IndexError):
        found = container.demux(stream) if stream else container.demux()
        for count, packet in enumerate(found):
            if count == MOST_PACKETS:
                raise _ManyPacketsError
            yield packet


def decoded(packet: "Packet") -> list[Any] | None:
    """Return the frames of a packet of audio or video, or None if it can't be decoded."""
    import av

    try:
        return packet.decode()
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        return None


def _sections(
    source: Source, where: str, part: Part, warn: Warn, promised: float | None
) -> Iterator[Section]:
    """Decode a file's samples. promised: length in seconds, if it is known to be cut short."""
    count = broken = 0
    ends_broken, marked, found, batch = part.cut, False, 0.0, _Batch()
    with opened(source, where, "audio", part) as container:
        stream = _audio_stream(container, source, where)
        # One of these without its size ends in such a packet, too.
        name = container.format.name
        trusted = name not in ("wav", "mmf") and (name != "caf" or stream.frames > 0)
        by_size = name in BY_SIZE
        for packet in packets(container, stream):
            frames = decoded(packet)
            # The samples of a W64 are filled up to a multiple of so many bytes.
            filling = name == "w64" and frames is None and packet.size < _W64_UNIT
            if packet.size and not filling:
                failed = frames is None
                count, broken = count + 1, broken + failed
                # All packets of ADX are marked so.
                torn = trusted and packet.is_corrupt and not marked
                ends_broken, marked = part.cut or failed or torn, packet.is_corrupt
            for frame in frames or ():
                found += frame.samples / frame.sample_rate
                yield from batch.add(frame)
        yield from batch.take()
    if promised is not None and not by_size and found >= promised - MISSING_S:
        promised = None  # its packets are longer than they say
    if promised is not None or ends_broken:
        warn(cut_short(where, promised, found))
    elif broken:
        warn(
            f"{where}: {broken} of {count} packets of the file can't be decoded. They are left "
            f"out, and the other {found:.2f} s are used."
        )


class _Batch:
    """Samples of frames of one rate, type and number of channels, joined to one block."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._rate = self._numbers = 0

    def add(self, frame: "AudioFrame") -> Iterator[Section]:
        """Take a frame; yield the blocks that are ready."""
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
        """Yield what is left."""
        if self._parts:
            block = np.concatenate(self._parts)
            self._parts, self._numbers = [], 0
            yield self._rate, block


def frame_samples(frame: "AudioFrame") -> NDArray[Any]:
    """Return a frame's samples, [samples, channels], of the type that they have."""
    import av

    channels, planar = frame.layout.nb_channels, frame.format.is_planar
    if frame.format.name == "s64":  # it has no way to numpy
        plane = np.frombuffer(memoryview(frame.planes[0]), np.int64, frame.samples * channels)
        return plane.reshape(-1, channels).copy()
    # Of 8 planes PyAV 18 reads a ninth, and crashes.
    if frame.format.name == "s64p" or (planar and channels >= 8):
        (frame,) = av.AudioResampler(format="dbl").resample(frame)
        planar = False
    array: NDArray[Any] = frame.to_ndarray()
    return array.T if planar else array.reshape(-1, channels)
