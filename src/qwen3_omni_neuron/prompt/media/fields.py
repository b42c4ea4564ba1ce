"""Fields of a media item: its file or bytes, the file's format, and numbers.

Each format is read by one library; others are refused by name.
"""

import base64
import io
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import unquote

from qwen3_omni_neuron.errors import (
    AudioError,
    ImageError,
    InputError,
    VideoError,
    did_you_mean,
    format_value,
    printable,
)

Source = str | Path | bytes
FILES = (str, Path, bytes, bytearray)
"""Types of an item's file, unlike samples and pixels."""
Warn = Callable[[str], object]
"""Function of a sentence about a file that is used partly or unexpectedly."""
_SCHEME = re.compile(r"(data):|([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_NAME_CHARACTERS = 200


def ignore(*_: object) -> None:
    """Drop a warning, or pass a check: the default."""


def source_of(value: Any, where: str, error: type[InputError]) -> Source | None:
    """Return the file or bytes that a media item names, else None.

    A string is a path, a local file:// URL or a data: URL in base64. Raises `error` for other URLs.
    """
    if isinstance(value, bytearray):
        return bytes(value)  # copied once: io.BytesIO copies others whenever it opens one
    if not isinstance(value, str):
        return value if isinstance(value, Path | bytes) else None
    found = _SCHEME.match(value)
    if found is None:
        return value
    scheme = (found[1] or found[2]).lower()
    if scheme == "data":
        return _of_data_url(value, where, error)
    if scheme != "file":
        raise error(
            f"{where}: {name_of(value)} is a URL, which is not fetched here. Download it and give "
            "its path or bytes, or use a server started with --allow-media-host."
        )
    host, _, path = value[found.end() :].partition("/")
    if host.lower() not in ("", "localhost"):
        raise error(
            f"{where}: {name_of(value)} names the host {printable(host, _NAME_CHARACTERS)}. For a "
            "local file use file:///PATH with the whole path, or a path without file://."
        )
    return "/" + unquote(path, errors="surrogateescape")


def _of_data_url(url: str, where: str, error: type[InputError]) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise error(f"{where} has a data URL that is not of the form data:TYPE;base64,CONTENT.")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as reason:
        raise error(
            f"{where} has a data URL whose content is not base64 ({reason}). Encode the file's "
            "bytes in one piece."
        ) from reason


def name_of(source: Source) -> str:
    """Return the name of a source for errors."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return printable(str(source), _NAME_CHARACTERS)


def open_media(source: Source, where: str, error: type[InputError]) -> BinaryIO:
    """Open the source; the caller closes it.

    Raises `error` for a missing, empty or irregular file.
    """
    if isinstance(source, bytes):
        if not source:
            raise error(f"{where} is empty: 0 bytes.")
        return io.BytesIO(source)
    name = name_of(source)
    try:
        status = Path(source).stat()
    except FileNotFoundError:
        raise error(f"{where}: {name} does not exist.") from None
    except OSError as reason:
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason
    except ValueError as reason:
        raise error(f"{where}: {name} can't be opened ({reason}).") from reason
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{where}: {name} is not a regular file.")
    if not status.st_size:
        raise error(f"{where}: {name} is empty: 0 bytes.")
    try:
        return Path(source).open("rb")
    except OSError as reason:
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason


def real_number(value: Any) -> float | None:
    """Return a finite number as a float, None for anything else and a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):  # numpy counts a timedelta64 as a number
        return None
    return number if math.isfinite(number) else None


def whole_number(value: Any) -> int | None:
    """Return an integer, None for anything else and a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):
        return None


Kind = Literal["audio", "image", "video"]
Library = Literal["soundfile", "PyAV", "Pillow"]
SOUND_NAMES = "WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, AAC"
VIDEO_NAMES = "MP4, MOV, M4A, WebM, Matroska, AVI and MPEG-TS"
PICTURE_NAMES = "JPEG, PNG, WebP, GIF, BMP and TIFF"
HEAD_BYTES = 1 << 14
_ERRORS: dict[Kind, type[InputError]] = {
    "audio": AudioError,
    "image": ImageError,
    "video": VideoError,
}
_ANOTHER = {
    "audio": 'sound ({}), not {}. Send it as an item of type "audio" (input_audio over HTTP)',
    "image": 'a picture ({}), not {}. Send it as an item of type "image" (image_url over HTTP)',
    "video": 'a video ({}), not {}. Send it as an item of type "video" (video_url over HTTP)',
}
_WANTED = {"audio": "sound", "image": "an image", "video": "a video"}
_CONVERTED = {"audio": "sound.flac", "image": "picture.png", "video": "video.mp4"}


@dataclass(frozen=True)
class FileFormat:
    """Format of a file. library: its reader, None if refused."""

    kind: Kind
    name: str
    library: Library | None = None


_Reading = tuple[Kind, Library | None]
_SOUND: _Reading = ("audio", "soundfile")
_VIDEO: _Reading = ("video", "PyAV")
_PICTURE: _Reading = ("image", "Pillow")
_FORMATS: tuple[tuple[bytes, str, _Reading], ...] = (
    (rb"(?:RIFF|RIFX|RF64).{4}WAVE", "WAV", _SOUND),
    (rb"FORM.{4}AIF[FC]", "AIFF", _SOUND),
    (rb"fLaC", "FLAC", _SOUND),
    (rb"OggS.{24}(?:\x01vorbis|OpusHead|\x7fFLAC)", "Ogg", _SOUND),
    (rb"\0*(?:ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb])", "MP3", ("audio", "PyAV")),
    (rb"\xff[\xf0\xf1\xf8\xf9]", "AAC", ("audio", "PyAV")),
    (rb".{4}ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)", "HEIC", ("image", None)),
    (rb".{4}ftypavi[fs]", "AVIF", ("image", None)),
    (rb".{4}ftypM4A ", "M4A", ("audio", "PyAV")),
    (rb".{4}ftyp", "MP4", _VIDEO),
    (rb".{4}(?:moov|mdat|wide|free|skip|pnot)", "MOV", _VIDEO),
    (rb"\x1aE\xdf\xa3", "WebM or Matroska", _VIDEO),
    (rb"RIFF.{4}AVI ", "AVI", _VIDEO),
    (rb"G.{187}G|.{4}G.{191}G", "MPEG-TS", _VIDEO),
    (rb"\xff\xd8\xff", "JPEG", _PICTURE),
    (rb"\x89PNG\r\n\x1a\n", "PNG", _PICTURE),
    (rb"RIFF.{4}WEBP", "WebP", _PICTURE),
    (rb"GIF8[79]a", "GIF", _PICTURE),
    (rb"BM.{12}[\x0c-\x7c]\0\0\0", "BMP", _PICTURE),
    (rb"II[*+]\0|MM\0[*+]", "TIFF", _PICTURE),
    (rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "WMA or WMV", ("audio", None)),
    (rb"OggS.{24}Speex   ", "Ogg with Speex", ("audio", None)),
    (rb"OggS", "Ogg without Vorbis or Opus", ("video", None)),
    (rb"caff", "CAF", ("audio", None)),
    (rb"\.snd", "AU", ("audio", None)),
    (rb"riff\x2e\x91\xcf\x11", "W64", ("audio", None)),
    (rb"#!AMR", "AMR", ("audio", None)),
    (rb"\x0b\x77", "AC-3", ("audio", None)),
    (rb"\xff[\xe4\xe5\xf4\xf5\xfc\xfd]", "MP2", ("audio", None)),
    (rb"wvpk", "WavPack", ("audio", None)),
    (rb"MAC ", "Monkey's Audio", ("audio", None)),
    (rb"MThd", "MIDI", ("audio", None)),
    (rb"FLV\x01", "FLV", ("video", None)),
    (rb"\0\0\x01[\xb3\xba]", "MPEG", ("video", None)),
    (rb"\.RMF", "RealMedia", ("video", None)),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "JPEG 2000", ("image", None)),
    (rb"\0\0\0\x0cJXL |\xff\x0a", "JPEG XL", ("image", None)),
    (rb"\0\0[\x01\x02]\0[^\0]\0", "an icon", ("image", None)),
    (rb"icns", "ICNS", ("image", None)),
    (rb"8BPS", "PSD", ("image", None)),
    (rb"P[1-7]\s", "PPM", ("image", None)),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "EPS or PostScript", ("image", None)),
    (rb"%PDF", "PDF", ("image", None)),
    (rb"(?:\xef\xbb\xbf)?\s*<svg|(?:\xef\xbb\xbf)?\s*<[?!].{0,512}<svg", "SVG", ("image", None)),
)
_PATTERNS = tuple(
    (re.compile(start, re.DOTALL), FileFormat(kind, name, library))
    for start, name, (kind, library) in _FORMATS
)


def file_format(head: bytes) -> FileFormat | None:
    """Return the format of a file's first HEAD_BYTES bytes, None if unknown."""
    return next((found for pattern, found in _PATTERNS if pattern.match(head)), None)


def read_format(source: Source, where: str, wanted: Kind) -> FileFormat:
    """Return the format of a file to be read as `wanted`; audio may be in a video.

    Raises AudioError, ImageError or VideoError for another kind or an unsupported format.
    """
    error, name = _ERRORS[wanted], name_of(source)
    with open_media(source, where, error) as file:
        found = file_format(file.read(HEAD_BYTES))
    convert = "Convert it, for example with ffmpeg -i "
    convert += "FILE" if isinstance(source, bytes) else name
    if found is None:
        known = PICTURE_NAMES if wanted == "image" else VIDEO_NAMES
        known = f"{SOUND_NAMES}, {known}" if wanted == "audio" else known
        raise error(
            f"{where}: {name} is of an unknown format, or damaged. Formats of {wanted}: {known}. "
            f"{convert} {_CONVERTED[wanted]}."
        )
    if found.library is None:
        raise error(
            f"{where}: {name} is {found.name}, which is not supported. {convert} "
            f"{_CONVERTED[found.kind]}."
        )
    fits = found.kind == wanted or (found.kind, wanted) == ("video", "audio")
    # A file that begins as M4A may be a video.
    if not fits and (found.name, wanted) != ("M4A", "video"):
        raise error(
            f"{where}: {name} is {_ANOTHER[found.kind].format(found.name, _WANTED[wanted])}."
        )
    return found


DETAILS = ("auto", "low", "high", "original")
MOST_PIXELS = 2**62
MOST_SIDE = 1 << 20
_MOST_FRAMES = 2**31 - 1
_MOST_SECONDS = 1e9
# One frame in 11 days: slower than any time lapse; positions still fit float32.
LEAST_FPS, MOST_FPS = 1e-6, 1e6

Refusal = Callable[[str, str | None], Exception]
"""Function (message, name) that returns the error for a field; name None: several."""


@dataclass(frozen=True)
class FieldValues:
    """Values of a field. phrase: after "it is". read: returns the value, or None to refuse it."""

    phrase: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ItemField:
    """Field of media items. of_files: refused beside frames. over_http: requests have it, too."""

    name: str
    kinds: tuple[str, ...]
    help: str
    values: FieldValues
    of_files: bool = False
    over_http: bool = True


def _whole(least: int, most: int, phrase: str) -> FieldValues:
    """Return integers from `least` on, clamped to `most`."""

    def read(value: Any) -> int | None:
        number = whole_number(value)
        return None if number is None or number < least else min(number, most)

    return FieldValues(phrase, read, {"type": "integer", "minimum": least})


def _real(least: float, most: float, phrase: str) -> FieldValues:
    def read(value: Any) -> float | None:
        number = real_number(value)
        return number if number is not None and least <= number <= most else None

    return FieldValues(phrase, read, {"type": "number", "minimum": least, "maximum": most})


def _side(value: Any) -> int | None:
    number = whole_number(value)
    return number if number is not None and 1 <= number <= MOST_SIDE else None


def _detail(value: Any) -> str | None:
    name = str.__str__(value) if isinstance(value, str) else None
    return name if name in DETAILS else None


def _pixels(value: Any) -> int | None:
    """Read a number of pixels; qwen-omni-utils accepts fractions."""
    number = whole_number(value)
    if number is None:
        real = real_number(value)
        number = None if real is None else int(real)
    return None if number is None or number < 1 else min(number, MOST_PIXELS)


def _as_it_is(value: Any) -> Any:
    return value


_SEEN, _FILMED, _HEARD = ("image", "video"), ("video",), ("audio",)
_DETAIL = FieldValues(
    f"{', '.join(DETAILS[:-1])} or {DETAILS[-1]}", _detail, {"enum": list(DETAILS)}
)
_PIXELS = _whole(1, MOST_PIXELS, "a whole number, 1 or more")
_TOTAL = FieldValues("a number, 1 or more", _pixels, {"type": "number", "minimum": 1})
_SIDE = FieldValues(
    f"a whole number from 1 to {MOST_SIDE}",
    _side,
    {"type": "integer", "minimum": 1, "maximum": MOST_SIDE},
)
_RATE_PHRASE = f"a number of frames a second, above 0: {LEAST_FPS:g} to {MOST_FPS:g}"
_RATE = _real(LEAST_FPS, MOST_FPS, _RATE_PHRASE)
_FRAMES = _whole(1, _MOST_FRAMES, "an integer of 1 or more")
_PAIRED = _whole(2, _MOST_FRAMES, "an integer of 2 or more, since frames are used in pairs")
_SECONDS = _real(0, _MOST_SECONDS, f"a number of seconds from 0 to {_MOST_SECONDS:g}")
_HERTZ, _WAVEFORM = FieldValues("a number of Hz", _as_it_is), FieldValues("sound", _as_it_is)

ITEM_FIELDS = (
    ItemField("detail", _SEEN, "resolution: low uses few tokens", _DETAIL),
    ItemField("min_pixels", _SEEN, "least pixels of an image or a frame after resizing", _PIXELS),
    ItemField("max_pixels", _SEEN, "most pixels of an image or a frame after resizing", _PIXELS),
    ItemField("total_pixels", _FILMED, "most pixels of all pairs of frames after resizing", _TOTAL),
    ItemField("resized_height", _SEEN, "height after resizing, rounded to whole tokens", _SIDE),
    ItemField("resized_width", _SEEN, "width after resizing, rounded to whole tokens", _SIDE),
    ItemField("fps", _FILMED, "frames sampled a second; of frames, their rate", _RATE),
    ItemField("sample_fps", _FILMED, "the rate of frames, as fps", _RATE, over_http=False),
    ItemField("nframes", _FILMED, "frames sampled in all, in place of fps", _PAIRED, of_files=True),
    ItemField("min_frames", _FILMED, "least frames sampled, with fps", _FRAMES, of_files=True),
    ItemField("max_frames", _FILMED, "most frames sampled, with fps", _PAIRED, of_files=True),
    ItemField("video_start", _FILMED, "second at which the part begins", _SECONDS, of_files=True),
    ItemField("video_end", _FILMED, "second at which the part ends", _SECONDS, of_files=True),
    ItemField("audio_start", _HEARD, "second at which the part begins", _SECONDS),
    ItemField("audio_end", _HEARD, "second at which the part ends", _SECONDS),
    ItemField(
        "sampling_rate", ("audio", "video"), "rate of samples in Hz", _HERTZ, over_http=False
    ),
    ItemField("audio", _FILMED, "sound in place of the file's", _WAVEFORM, over_http=False),
)
_ELSEWHERE = {
    "use_audio_in_video": "It is an option of the request, not of an item",
    "sample_fps": "The rate of frames is fps",
    "raw_fps": "The rate of frames is fps",
}


def fields_of(kind: str, over_http: bool = False) -> dict[str, ItemField]:
    """Return the fields of a kind of item by name, in Python or over HTTP."""
    return {f.name: f for f in ITEM_FIELDS if kind in f.kinds and (f.over_http or not over_http)}


def read_fields(
    kind: str,
    given: Mapping[str, Any],
    where: str,
    refusal: Refusal,
    over_http: bool = False,
    of_file: bool = True,
) -> dict[str, Any]:
    """Return the checked fields of an item, except None.

    given: its fields, without type and medium. of_file: the medium is a file, not frames. Raises
    the error of `refusal` for an unknown field, a wrong value, or a contradiction.
    """
    known = fields_of(kind, over_http)
    made: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        found = known.get(name) if isinstance(name, str) else None
        if found is None:
            raise refusal(f"{where} has {unknown_name(name, [kind, *known])}", _text(name))
        if found.of_files and not of_file:
            raise refusal(
                f"{where} has {name}, which is for files, but the {kind} is frames. Leave it out, "
                "and choose the frames yourself.",
                name,
            )
        made[found.name] = checked = found.values.read(value)
        if checked is None:
            message = f"{where} has {name} {format_value(value)}; it must be {found.values.phrase}."
            raise refusal(message, name)
    for message, wrong in _contradictions(made):
        raise refusal(f"{where} has {message}", wrong)
    return made


def unknown_name(name: Any, known: list[str]) -> str:
    """Return the end of a sentence about an unknown field."""
    hint = "" if not isinstance(name, str) else _hint(name, known)
    return f"an unknown field {format_value(name)}.{hint} It may have {', '.join(known)}."


def _hint(name: str, known: list[str]) -> str:
    if name in _ELSEWHERE:
        return f" {_ELSEWHERE[name]}."
    kinds = [kind for f in ITEM_FIELDS if f.name == name for kind in f.kinds]
    if kinds:
        return f" It is a field of {' and '.join(kinds)} items."
    return did_you_mean(name, known)


def _text(name: Any) -> str | None:
    return str.__str__(name)[:80] if isinstance(name, str) else None


def _contradictions(made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each contradiction's message, and the field to change."""
    if "fps" in made and "nframes" in made:
        yield "fps and nframes. Give one of them.", "nframes"
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        if low in made and high in made and made[low] > made[high]:
            yield f"{low} {made[low]}, above its {high} {made[high]}.", low
    for start, end in (("video_start", "video_end"), ("audio_start", "audio_end")):
        if end in made and made[end] <= made.get(start, 0.0):
            begins = made.get(start, 0.0)
            yield f"{end} {made[end]:g}, which is not after its {start} {begins:g}.", end
    sides = "resized_height", "resized_width"
    for name, other in (sides, sides[::-1]):
        if name in made and other not in made:
            yield f"{name} without {other}. Give both.", name
