"""Files with streams, decoded by PyAV without access to anything else; their audio.

Audio is in a WebM, Matroska, MP4 or M4A file, as browsers and phones record it. A file is read
twice: first its packets, without decoding, for the length, which the header of a recording that was
streamed does not have; then its samples.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError, InputError
from qwen3_omni_neuron.prompt.media.fields import Source, name_of, open_media

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_COMPLETE = Fraction(9, 10)  # part of an MP4 header's length, which is not exact to a packet
_MORE = 1.01  # decoded length over that of the packets, where the file is right, and
_MORE_S = 1.0  # seconds: a codec's first and last samples


class _Nameless:
    """File object without a name, so that FFmpeg finds the format from the content alone."""

    def __init__(self, file: BinaryIO):
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


@contextmanager
def opened(
    source: Source, where: str, kind: str, error: type[InputError], form: str | None = None
) -> "Iterator[InputContainer]":
    """Open a file with PyAV, and close it afterwards.

    kind: what is wanted of it, "audio" or "video". form: FFmpeg's name of the format; None: found
    from the content. Raises `error`, which begins with `where`, when PyAV is not installed or the
    file can't be opened, and for PyAV's errors inside the context.
    """
    try:
        import av
    except ImportError as reason:
        instead = {"audio": "send WAV, FLAC, OGG or MP3", "video": "give frames, with their fps"}
        raise error(
            f"{where} is {kind} in a file that PyAV decodes, and it isn't installed. "
            f"Run: pip install 'qwen3-omni-neuron[video]'; or {instead[kind]}."
        ) from reason
    # FFmpeg also reads playlists, which name other files, on this machine or another. With no
    # protocol allowed it can't open those; the file object that we opened needs none.
    options = {"protocol_whitelist": ""}
    with open_media(source, where, error) as file:
        try:
            with av.open(
                _Nameless(file), "r", form, options=options, metadata_errors="replace"
            ) as container:
                yield container
        except InputError:
            raise
        # ValueError and ArithmeticError come from PyAV, and from arithmetic with the file's
        # numbers.
        except (av.FFmpegError, ValueError, ArithmeticError) as reason:
            raise error(
                f"{where}: {name_of(source)} can't be decoded as {kind}; it is something else, "
                f"broken or cut short ({reason}). Export it again."
            ) from reason


def no_decoder(where: str, source: Source, kind: str, error: type[InputError]) -> InputError:
    """Return the error for a stream whose codec can't be decoded. kind: "audio" or "video"."""
    return error(
        f"{where}: the {kind} of {name_of(source)} is of a codec that FFmpeg has no decoder for "
        "here. Export it with another one, such as H.264 and AAC."
    )


@dataclass(frozen=True)
class ContainedAudio:
    """First audio stream of a file, not yet decoded.

    rate: sampling rate in Hz. seconds: length of its packets, which may have some samples that the
    file says to leave out. blocks: float32 [samples, channels]; can be iterated once, and raises
    AudioError.
    """

    rate: int
    seconds: float
    blocks: Iterator[NDArray[np.float32]]


def container_format(source: Source, where: str) -> str | None:
    """Return FFmpeg's name of a file's format, by its first bytes; None if it is not a container.

    Raises AudioError if the file can't be opened.
    """
    with open_media(source, where, AudioError) as file:
        first = file.read(8)
    if first[:4] == b"\x1aE\xdf\xa3":  # EBML
        return "matroska"  # and WebM
    return "mp4" if first[4:] == b"ftyp" else None  # and M4A, MOV, 3GP


def open_contained(source: Source, where: str, form: str) -> ContainedAudio:
    """Open a file's first audio stream. form: of `container_format`.

    Raises AudioError when it can't be opened, has no audio that can be decoded, or is an MP4 that
    is cut short. Of a WebM that is cut short, what is there is read.
    """
    with opened(source, where, "audio", AudioError, form) as container:
        stream = _audio_stream(container, source, where)
        rate, ticks = _measure(container, stream)
        tick = stream.time_base or Fraction(1)
        seconds = ticks * tick
        if rate is None:
            raise AudioError(f"{where}: {name_of(source)} has no sound that can be decoded.")
        promised = (stream.duration or 0) * tick if form == "mp4" else 0
        if seconds < _COMPLETE * promised:
            raise AudioError(
                f"{where}: {name_of(source)} is cut short: of {float(promised):.2f} s of audio "
                f"{float(seconds):.2f} s are there. Copy or export it again."
            )
    blocks = _blocks(source, where, form, rate, float(seconds))
    return ContainedAudio(rate, float(seconds), blocks)


def _audio_stream(container: "InputContainer", source: Source, where: str) -> "AudioStream":
    if not container.streams.audio:
        others = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise AudioError(
            f"{where}: {name_of(source)} has no audio, only {others}. Send a recording with sound."
        )
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise no_decoder(where, source, "audio", AudioError)
    return stream


def _measure(container: "InputContainer", stream: "AudioStream") -> tuple[int | None, int]:
    """Return the sampling rate of the first samples, and the length in ticks of the stream.

    The rate is None if no packet can be decoded. A header may have half of it, as HE-AAC's.
    """
    rate: int | None = None
    ticks, untimed, bounds = 0, False, (math.inf, -math.inf)
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if rate is None:
            rate = next((frame.sample_rate for frame in packet.decode()), None)
        ticks += packet.duration or 0
        untimed |= not packet.duration
        if packet.pts is not None:
            bounds = min(bounds[0], packet.pts), max(bounds[1], packet.pts)
    return rate, max(ticks, int(bounds[1] - bounds[0])) if untimed else ticks


def _blocks(
    source: Source, where: str, form: str, rate: int, seconds: float
) -> Iterator[NDArray[np.float32]]:
    """Decode the samples of a file whose packets last `seconds`."""
    import av

    with opened(source, where, "audio", AudioError, form) as container:
        stream = _audio_stream(container, source, where)
        resampler = av.AudioResampler(format="fltp")  # rate and channels stay as they are
        channels, count = None, 0
        for frame in container.decode(stream):
            now = frame.layout.nb_channels
            if (frame.sample_rate, now) != (rate, channels or now):
                raise AudioError(
                    f"{where}: {name_of(source)} changes from {rate} Hz and {channels or now} "
                    f"channels to {frame.sample_rate} Hz and {now} channels at "
                    f"{count / rate:.3f} s. Export it with one of them."
                )
            channels = now
            count += frame.samples
            if count > (_MORE * seconds + _MORE_S) * rate:
                raise AudioError(
                    f"{where}: {name_of(source)} has more audio than its packets say, which last "
                    f"{seconds:.3f} s. Export it again."
                )
            for part in resampler.resample(frame):
                samples: NDArray[Any] = part.to_ndarray()  # [channels, samples]
                yield samples.T
