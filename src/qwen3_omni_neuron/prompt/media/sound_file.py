"""Sound file -> blocks of samples, all of them, at the rates that the file has.

libsndfile reads what it reads exactly: WAV, AIFF, FLAC, Ogg and others by their first bytes. PyAV
decodes everything else, packet by packet, and what libsndfile can't: a FLAC without its length, a
WAV whose size is 0, Ogg FLAC. Not libsndfile's MP3: it stops at an estimated length.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qwen3_omni_neuron.errors import AudioError
from qwen3_omni_neuron.prompt.media.container import OpenedSound, Section, open_contained
from qwen3_omni_neuron.prompt.media.cut_short import MISSING_S, cut_short
from qwen3_omni_neuron.prompt.media.fields import Source, Warn, ignore, name_of, open_media
from qwen3_omni_neuron.prompt.media.joined import UNKNOWN_SIZE, FileView, Part, find_parts

BLOCK_NUMBERS = 1 << 20  # numbers of all channels in one block: 11 s of 48 kHz stereo, 4 MiB
# First bytes of the files that are given to libsndfile.
_LIBSNDFILE = (
    *(b"RIFF", b"RIFX", b"RF64", b"riff", b"FORM", b".snd", b"caff", b"fLaC", b"OggS"),
    *(b"Creative Voice File", b"NIST_1A", b"PVF1", b"2BIT", b" paf", b"fap ", b"MATLAB 5.0"),
    *(b"Extended Instrument: ", b"ALawSoundFile"),  # XI, WVE
    *(bytes(4) + b"\1\0\0\0" * 2, b"\0\0\3\xe8" + b"\0\0\0\1" * 2),  # MAT4
)
_HTK = struct.Struct(">I4xHH")  # samples, bytes of one, kind: 0 is a waveform
# Head of an MPC2K file: magic, channels - 1, samples of a channel.
_MPC2K = struct.Struct("<2s19xB8xI8x")
_UNKNOWN_LENGTH = 2**63 - 1  # number of samples that libsndfile gives if the header has none
# Line of libsndfile's log about a chunk of sound that is shorter than it says.
_SHORTER = re.compile(
    r"^\s*(?:data|SSND|BODY|Data Size|riff|Riff size|Data length)\s*:? (\d+) \(?should be (\d+)",
    re.MULTILINE,
)
# Number of samples that a header promises, in that log or in a file's own text.
_FRAMES = re.compile(rb"\b(?:[Ff]rames *:|Cols *:|sample_count -i) (\d+)")
_SAY_FRAMES = ("AVR", "MAT4", "MAT5", "NIST", "W64")  # libsndfile's formats that have it
# In that log about a W64, whose samples libsndfile takes for PCM where they are not.
_EXTENSIBLE, _PCM = "WAVE_FORMAT_EXTENSIBLE", "format : pcm"
_HEAD = 1024  # bytes: the text at the beginning of a NIST file
_MOST_WARNINGS = 4  # warnings about one file


def open_sound(source: Source, where: str, warn: Warn) -> OpenedSound:
    """Open a file of sound, or of several joined to one.

    warn: called, while the samples are read, for a file that is cut short or damaged.
    Raises AudioError, which begins with `where`, if nothing in it can be read.
    """
    warn = _FewWarnings(where, warn)
    with open_media(source, where, AudioError) as file:
        parts = find_parts(file, where)
    opened: list[OpenedSound] = []
    error: AudioError | None = None
    for number, part in enumerate(parts, 1):
        try:
            sound = _open_by_libsndfile(source, where, part, warn)
            opened.append(sound or open_contained(source, where, part, warn))
        except AudioError as reason:
            error = error or reason
            if len(parts) > 1:
                warn(
                    f"{where}: of the {len(parts)} files that it is joined of, file {number} can't "
                    "be read. It is left out."
                )
    if not opened:
        assert error is not None
        raise error
    error = None  # its traceback has this function's frame, which would keep the files open
    sections = _all_sections(opened, warn)
    return OpenedSound(opened[0].rate, sum(sound.seconds for sound in opened), sections)


class _FewWarnings:
    """Function that passes on a file's first warnings: many files may be joined."""

    def __init__(self, where: str, warn: Warn):
        self._where, self._warn, self._count = where, warn, 0

    def __call__(self, warning: str) -> None:
        self._count += 1
        if self._count <= _MOST_WARNINGS:
            self._warn(warning)

    def finish(self) -> None:
        """Say how many warnings were not passed on."""
        more = self._count - _MOST_WARNINGS
        if more > 0:
            are = "warning about this file is" if more == 1 else "warnings about this file are"
            self._warn(f"{self._where}: {more} more {are} left out.")


def _all_sections(opened: list[OpenedSound], warn: _FewWarnings) -> Iterator[Section]:
    try:
        for sound in opened:
            yield from sound.sections
    finally:  # also if only a part is read
        warn.finish()


def _open_by_libsndfile(source: Source, where: str, part: Part, warn: Warn) -> OpenedSound | None:
    """Open a file; return None if libsndfile can't read it, or not exactly."""
    import soundfile

    with open_media(source, where, AudioError) as file:
        view: Any = FileView(file, part)
        head = view.read(_HEAD)
        if not head.startswith(_LIBSNDFILE) and not _has_its_size(head, part.end - part.start):
            return None
        view.seek(0)
        try:
            with soundfile.SoundFile(view) as audio:
                frames, rate, log = audio.frames, audio.samplerate, audio.extra_info
                form, subtype = audio.format, audio.subtype
        except (soundfile.SoundFileError, TypeError):
            return None
    misread = form == "W64" and _EXTENSIBLE in log and _PCM not in log
    if frames in (0, _UNKNOWN_LENGTH) and subtype.startswith("G72") and form == "WAV":
        raise AudioError(  # PyAV would take its bits in another order
            f"{where}: {name_of(source)} has sound of {subtype} and no length in its header, "
            "without which it can't be decoded. Export it again."
        )
    if misread or subtype.startswith("MPEG") or frames in (0, _UNKNOWN_LENGTH):
        return None
    seconds = frames / rate
    promised = seconds * _promised(log)
    if form in _SAY_FRAMES:
        said = [int(count) for count in _FRAMES.findall(log.encode() + head)]
        promised = max([promised, *(count / rate for count in said if count < UNKNOWN_SIZE)])
    part = replace(part, cut=part.cut or "truncated file" in log)
    # libsndfile trusts the number of samples in a FLAC's header.
    measured = _measured_s(source, where, part) if form == "FLAC" else None
    if measured is not None and measured > seconds + MISSING_S:
        warn(
            f"{where}: its header promises {seconds:.2f} s, and {measured:.2f} s are there. All of "
            "it is used."
        )
        return None
    seconds = min(seconds, measured or seconds)
    return OpenedSound(rate, seconds, _read(source, where, part, warn, promised))


def _has_its_size(head: bytes, size: int) -> bool:
    """Return whether a file is HTK or MPC2K: their magics are short, so that its size decides."""
    if len(head) < _MPC2K.size:
        return False
    samples, sample_bytes, kind = _HTK.unpack_from(head)
    magic, more_channels, frames = _MPC2K.unpack_from(head)
    is_htk = (sample_bytes, kind) == (2, 0) and size == _HTK.size + 2 * samples
    mpc2k_size = _MPC2K.size + 2 * (1 + more_channels) * frames
    return is_htk or (magic == b"\1\4" and more_channels <= 1 and size == mpc2k_size)


def _measured_s(source: Source, where: str, part: Part) -> float | None:
    """Return a file's length by its packets; None if PyAV isn't installed or can't read it."""
    try:
        return open_contained(source, where, part, ignore).seconds
    except AudioError:
        return None


def _promised(log: str) -> float:
    """Return how much longer than it is a file promises to be, by libsndfile's log."""
    said = [(int(size), int(there)) for size, there in _SHORTER.findall(log)]
    return max((size / there for size, there in said if 0 < there < size < UNKNOWN_SIZE), default=1)


def _read(source: Source, where: str, part: Part, warn: Warn, promised: float) -> Iterator[Section]:
    import soundfile

    count = 0
    with open_media(source, where, AudioError) as file:
        view: Any = FileView(file, part)
        try:
            with soundfile.SoundFile(view) as audio:
                rate = audio.samplerate
                # libsndfile shifts other numbers of a PAF by a channel where its buffer ends.
                dtype = "int32" if audio.format == "PAF" else "float32"
                # Not SoundFile.blocks(): it trusts the header's length, and repeats the last
                # block's samples if the file ends earlier.
                at_once = max(1, BLOCK_NUMBERS // audio.channels)
                while len(block := audio.read(at_once, dtype=dtype, always_2d=True)):
                    count += len(block)
                    yield rate, block
        except soundfile.SoundFileError:
            # Broken here, as a FLAC that is cut short. PyAV decodes what is left of it.
            yield from _skip(open_contained(source, where, part, warn).sections, count)
            return
    if count < promised * rate - 1:
        warn(cut_short(where, promised, count / rate))
    elif part.cut:
        warn(cut_short(where, None, count / rate))


def _skip(sections: Iterator[Section], count: int) -> Iterator[Section]:
    """Leave out the first `count` samples."""
    for rate, block in sections:
        yield rate, block[count:]
        count = max(0, count - len(block))
