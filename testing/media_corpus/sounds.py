"""Sound files of every container and codec that PyAV and libsndfile write here, and their damages.

What can be written is asked of the libraries. `forms` lists it without encoding anything, `cases`
makes of one of them the files that a test reads: whole, written to a pipe, at other rates and
numbers of channels, joined, cut short, with wrong size fields, and between junk.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from testing.made_recordings import Unseekable
from testing.media_corpus.size_fields import size_fields

Mono = NDArray[np.float32]
SECONDS = 1.2
RATES = (22050, 44100, 48000, 16000, 8000, 11025, 37800, 96000)
"""Rates in Hz, the one that is tried first at the beginning."""
CUTS = 10
_LAYOUTS = {
    1: ("mono",),
    2: ("stereo",),
    3: ("3.0", "2.1"),
    4: ("quad", "4.0"),
    5: ("5.0", "5.0(side)"),
    6: ("5.1", "5.1(side)"),
    7: ("6.1", "6.1(back)"),
    8: ("7.1", "7.1(wide)"),
}
_JUNK = np.random.default_rng(54).bytes(3000)
_ID3V1 = b"TAG" + b"Title".ljust(125, b"\0")
_ID3V2 = b"ID3\4\0\0\0\0\x10\0" + b"TIT2\0\0\0\x0a\0\0\3A tag    ".ljust(2048, b"\0")
_APE = (
    b"APETAGEX\xd0\7\0\0\x31\0\0\0\1\0\0\0\0\0\0\xa0"
    + bytes(8)
    + b"\5\0\0\0\0\0\0\0Title\0a tag"
    + bytes(1)
    + b"APETAGEX\xd0\7\0\0\x31\0\0\0\1\0\0\0\0\0\0\x80"
    + bytes(8)
)
BEFORE = {"zeros": bytes(3000), "an ID3v2 tag": _ID3V2, "random bytes": _JUNK}
AFTER = {"zeros": bytes(3000), "an ID3v1 tag": _ID3V1, "an APE tag": _APE, "random bytes": _JUNK}


@lru_cache
def signal(part: int, rate: int) -> Mono:
    """Return float32 [samples] of SECONDS. part: one of three sounds that tell themselves apart.

    A chirp in each third over a tone, so that what is lost or heard twice shows.
    """
    t = np.arange(round(SECONDS * rate)) / rate
    third = SECONDS / 3
    scale = (1.0, 0.85, 1.15)[part]
    hertz = np.array([[300, 600], [1100, 700], [1400, 2100]]) * scale
    place = np.minimum((t / third).astype(int), 2)
    low, high = hertz[place].T
    phase = np.cumsum(low + (high - low) * (t / third - place)) / rate
    tone = np.sin(2 * np.pi * 220 * scale * t)
    return (0.3 * np.sin(2 * np.pi * phase) + 0.08 * tone).astype(np.float32)


def gains(channels: int) -> NDArray[np.float32]:
    """Return how loud the signal is in each channel, so that a channel that is left out shows."""
    return np.linspace(1, 0.4, channels, dtype=np.float32) if channels > 1 else np.ones(1, "f4")


@dataclass(frozen=True)
class Form:
    """A container and a codec, as one of the libraries names them.

    container: FFmpeg's or libsndfile's name. sndfile: written by libsndfile.
    """

    container: str
    codec: str
    sndfile: bool = False
    endian: str = "FILE"

    def __str__(self) -> str:
        return f"{'sndfile' if self.sndfile else 'PyAV'} {self.container} {self.codec}"


@dataclass(frozen=True)
class Sound:
    """One sound of a file: which part, and how it was written."""

    part: int
    rate: int
    channels: int


@dataclass(frozen=True)
class Case:
    """A file. name: what was done to it. parts: the sounds that were written, in order."""

    form: Form
    name: str
    content: bytes
    parts: tuple[Sound, ...]

    @property
    def damage(self) -> str:
        """Kind of what was done, such as "cut"."""
        return self.name.split(":")[0]

    def __str__(self) -> str:
        return f"{self.form}, {self.name}"


def containers() -> list[str]:
    """Return the names of the containers, "sndfile" before libsndfile's."""
    found = [f"sndfile {name}" for name in sorted(soundfile.available_formats())]
    try:
        import av
        from av.format import ContainerFormat
    except ImportError:
        return found
    for name in sorted(av.formats_available):
        form = ContainerFormat(name)
        # Without a file: devices, networks, and writers of several files.
        if not form.is_output or form.no_file or name in _NOT_SOUND:
            continue
        with av.open(io.BytesIO(), "w", format=name) as out:
            if out.default_audio_codec != "none":
                found.append(name)
    return found


_NOT_SOUND = {  # write any stream's bytes without a header, which is no file of this codec
    *("data", "ffmetadata", "rawvideo", "mkvtimestamp_v2"),
}
_RATES = {  # by codec, container, or both: what FFmpeg's encoders and muxers take silently
    "libopencore_amrnb": (8000,),
    "g723_1": (8000,),
    "real_144": (8000,),
    "GSM610": (8000,),
    "flv pcm_alaw": (8000,),
    "flv pcm_mulaw": (8000,),
    **dict.fromkeys(("flv pcm_s16le", "flv pcm_u8"), (22050, 44100, 11025)),
    "voc pcm_u8": (8000,),  # a byte says the rate, as a fraction of 1 MHz
    "VOC PCM_U8": (8000,),
    "HTK PCM_16": (16000, 8000),  # as a multiple of 100 ns
    "WVE ALAW": (8000,),  # these have none in their headers
    "XI DPCM_8": (44100,),
    "XI DPCM_16": (44100,),
    "MPC2K PCM_16": RATES[:-1],  # 16 bits
    "SVX PCM_S8": RATES[:-1],
    "SVX PCM_16": RATES[:-1],
    **dict.fromkeys(("rm", "smjpeg", "wsaud"), RATES[:-1]),
    "SDS": (22050, 48000, 16000, 8000, 11025, 37800),  # as whole nanoseconds of a sample
}
_MOST_CHANNELS = {
    "flv": 2,  # with more FFmpeg's muxer would end the process
    "voc": 2,  # with more the rate, a fraction of 256 MHz by their number, is not exact
}
_BIT_RATES = {"aac": 128_000, "g723_1": 6300, "wmav1": 128_000, "wmav2": 128_000}
_WRONGLY_WRITTEN = {  # by FFmpeg's own muxers
    "flv pcm_s16be",  # little-endian by its header
    "wav vorbis",  # without the codec's headers
    "w64 vorbis",
}
_OGG = {"flac", "opus", "vorbis"}
_MPEG = {"ac3", "mp3", "pcm_dvd", "pcm_s16be"}
_UNLISTED = {  # codecs that these take and don't list
    **dict.fromkeys(("oga", "ogg", "ogv", "opus", "spx"), _OGG),
    **dict.fromkeys(("dvd", "mpeg", "svcd", "vcd", "vob"), _MPEG),
    "mpegts": {"pcm_bluray"},
}


def forms(container: str) -> Iterator[Form]:
    """Yield the forms of a container that may be written; `whole` finds which ones are."""
    if container.startswith("sndfile "):
        name = container.removeprefix("sndfile ")
        for subtype in sorted(soundfile.available_subtypes(name)):
            yield Form(name, subtype, True)
        return
    import av
    from av.codec import Codec

    with av.open(io.BytesIO(), "w", format=container) as out:
        listed, default = out.supported_codecs, out.default_audio_codec
    for name in encoders("audio"):
        known = {name, Codec(name, "w").canonical_name}
        if f"{container} {name}" in _WRONGLY_WRITTEN:
            continue
        if known & (listed | {default} | _UNLISTED.get(container, set())):
            yield Form(container, name)


@lru_cache
def encoders(kind: str) -> tuple[str, ...]:
    """Return the names of FFmpeg's encoders that are here. kind: "audio" or "video"."""
    import av
    from av.codec import Codec
    from av.codec.codec import UnknownCodecError

    found = []
    for name in sorted(av.codecs_available):
        try:
            codec = Codec(name, "w")
        except UnknownCodecError:
            continue
        if codec.type == kind and name not in ("anull", "vnull", "comfortnoise"):
            found.append(name)
    return tuple(found)


def write(form: Form, sound: Sound, *, piped: bool = False, serial: int = 0) -> bytes:
    """Return a file with one sound. Raises an error of its library where that can't write it."""
    mono = signal(sound.part, sound.rate)
    channels = mono[:, None] * gains(sound.channels)  # [samples, channels]
    if form.sndfile:
        file = io.BytesIO()
        # Of PAF, libsndfile loses other numbers where its own buffer ends.
        whole_numbers = (channels * 2.0**31).astype(np.int32)
        soundfile.write(
            file,
            whole_numbers if form.container == "PAF" else channels,
            sound.rate,
            subtype=form.codec,
            endian=form.endian,
            format=form.container,
        )
        return file.getvalue()
    for layout in _LAYOUTS[sound.channels]:
        try:
            return _write_av(form, channels, sound.rate, layout, piped, serial)
        except Exception as error:  # FFmpeg's and PyAV's, of the last layout
            reason = error
    raise reason


def _write_av(
    form: Form, channels: Mono, rate: int, layout: str, piped: bool, serial: int
) -> bytes:
    import av

    target: Any = Unseekable() if piped else io.BytesIO()
    chained = serial and form.container in ("oga", "ogg", "ogv", "opus", "spx")
    options = {"serial_offset": str(serial)} if chained else {}
    with av.open(target, "w", format=form.container, options=options) as out:
        stream: Any = out.add_stream(form.codec, rate=rate, layout=layout)
        stream.codec_context.options = {"strict": "-2"}  # FFmpeg's own encoders of Vorbis, Opus
        if form.codec in _BIT_RATES:
            stream.bit_rate = _BIT_RATES[form.codec]
        out.start_encoding()  # before the sound is encoded, because many containers refuse here
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(channels.T), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return bytes(target.content) if piped else target.getvalue()


def whole(form: Form) -> Case | None:
    """Return a file of a form, with the first rate and number of channels that it takes."""
    for channels in (1, 2, 6):
        for rate in rates(form):
            case = _try(form, "whole", Sound(0, rate, channels))
            if case is not None:
                return case
    return None


@lru_cache
def rates(form: Form) -> tuple[int, ...]:
    """Return RATES without those that the codec does not take."""
    for key in (form.codec, form.container, f"{form.container} {form.codec}"):
        if key in _RATES:
            return _RATES[key]
    if form.sndfile:
        return RATES
    from av.codec import Codec

    taken = Codec(form.codec, "w").audio_rates
    return RATES if not taken else tuple(rate for rate in RATES if rate in taken)


def _try(form: Form, name: str, sound: Sound, **how: Any) -> Case | None:
    if sound.channels > _MOST_CHANNELS.get(form.container, 8):
        return None
    try:
        content = write(form, sound, **how)
    except Exception:  # libraries' errors for what a codec or a container can't hold
        return None
    return Case(form, name, content, (sound,)) if content else None


Maker = Callable[[Case], Case | None]


def _piped(case: Case) -> Case | None:
    return None if case.form.sndfile else _try(case.form, "piped", case.parts[0], piped=True)


def _at(name: str, **changed: int) -> Maker:
    def make(case: Case) -> Case | None:
        sound = replace(case.parts[0], **changed)
        taken = sound != case.parts[0] and sound.rate in rates(case.form)
        return _try(case.form, name, sound) if taken else None

    return make


def _joined(count: int, *, piped: bool = False, serial: int = 0) -> Maker:
    def make(case: Case) -> Case | None:
        sounds = [replace(case.parts[0], part=part) for part in range(count)]
        if piped and case.form.sndfile:
            return None
        made = [
            _try(case.form, "", sound, piped=piped, serial=1 + serial * part)
            for part, sound in enumerate(sounds)
        ]
        return _join(f"joined: {count}{' piped' * piped}", made)

    return make


def _join(name: str, made: "list[Case | None]") -> Case | None:
    files = [case for case in made if case is not None]
    if len(files) < len(made):
        return None
    content = b"".join(case.content for case in files)
    parts = tuple(sound for case in files for sound in case.parts)
    return Case(files[0].form, name, content, parts)


def _joined_with_another(case: Case) -> Case | None:
    for rate in rates(case.form)[::-1]:
        sound = replace(case.parts[0], part=1, rate=rate)
        other = _try(case.form, "", sound) if rate != case.parts[0].rate else None
        if other is not None:
            return _join("joined: another rate", [case, other])
    return None


def _joined_with_more_channels(case: Case) -> Case | None:
    now = case.parts[0].channels
    sound = replace(case.parts[0], part=1, channels=3 - now)
    return _join("joined: another number of channels", [case, _try(case.form, "", sound)])


def _cut(tenth: int) -> Maker:
    def make(case: Case) -> Case | None:
        end = round(len(case.content) * (tenth + 0.5) / CUTS)
        name = f"cut: at {end} of {len(case.content)}"
        return replace(case, name=name, content=case.content[:end])

    return make


def _between(before: str | None, after: str | None) -> Maker:
    def make(case: Case) -> Case | None:
        if before == "an ID3v2 tag" and case.form.container == "RAW":
            return None  # by its beginning it is an MP3
        if before is not None:
            content = BEFORE[before] + case.content
            return replace(case, name=f"before: {before}", content=content)
        return replace(case, name=f"after: {after}", content=case.content + AFTER[str(after)])

    return make


MAKERS: dict[str, Maker] = {
    "piped": _piped,
    "joined": _joined(3),
    "joined pipes": _joined(2, piped=True),
    "chained": _joined(3, serial=1),
    "joined rates": _joined_with_another,
    "joined channels": _joined_with_more_channels,
    **{f"cut {tenth}": _cut(tenth) for tenth in range(CUTS)},
    **{f"before {name}": _between(name, None) for name in BEFORE},
    **{f"after {name}": _between(None, name) for name in AFTER},
    **{f"{rate} Hz": _at(f"rate: {rate}", rate=rate) for rate in RATES},
    **{f"{n} channels": _at(f"channels: {n}", channels=n) for n in range(1, 9)},
}


def _sizes(case: Case) -> list[Case]:
    """Return a file with each of its size fields 0, and all ones."""
    made = []
    for name, begin, end in size_fields(case.content):
        for value, byte in (("0", b"\0"), ("all ones", b"\xff")):
            content = case.content[:begin] + byte * (end - begin) + case.content[end:]
            made.append(replace(case, name=f"size: {name} {value}", content=content))
    return made


@lru_cache
def turns() -> dict[Form, int]:
    """Return the number of each form."""
    every = (form for container in containers() for form in forms(container))
    return {form: turn for turn, form in enumerate(every)}


def cases(form: Form, *, every: bool) -> Iterator[Case]:
    """Yield a whole file of a form, and damaged ones; nothing if the form can't be written.

    every: all of them. Otherwise one or two, which the forms take in turn.
    """
    case = whole(form)
    if case is None:
        return
    yield case
    turn, sizes = turns()[form], _sizes(case)
    makers = list(MAKERS.values())
    made = (makers[(turn + place) % len(makers)](case) for place in range(len(makers)))
    possible = (damaged for damaged in made if damaged is not None)
    if every:
        yield from possible
        # A file of many fields shares them with the other codecs of its container.
        yield from sizes[turn % 5 :: 5] if len(sizes) > 20 else sizes
        return
    yield next(possible)
    if sizes and not turn % 3:
        yield sizes[turn % len(sizes)]
