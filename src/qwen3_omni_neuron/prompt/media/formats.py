"""Formats of files: those that are read, each by one library, and names of others for errors."""

import re
from dataclasses import dataclass
from typing import Literal

from qwen3_omni_neuron.errors import AudioError, ImageError, InputError, VideoError
from qwen3_omni_neuron.prompt.media.fields import Source, name_of, open_media

Kind = Literal["audio", "image", "video"]
Library = Literal["soundfile", "PyAV", "Pillow"]
SOUND_NAMES = "WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, AAC"
VIDEO_NAMES = "MP4, MOV, M4A, WebM, Matroska, AVI and MPEG-TS"
PICTURE_NAMES = "JPEG, PNG, WebP, GIF, BMP and TIFF"
HEAD_BYTES = 1 << 14  # an MP3 may begin with some thousand zeros
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
_CONVERT = {
    "audio": "Convert it, for example with ffmpeg -i {0} sound.flac",
    "image": "Convert it, for example with ffmpeg -i {0} picture.png",
    "video": "Convert it, for example with ffmpeg -i {0} video.mp4",
}


@dataclass(frozen=True)
class FileFormat:
    """Format of a file. library: the one that reads it, None if the format is not read."""

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
    """Return the format of a file, None if it isn't known. head: its first HEAD_BYTES bytes."""
    return next((found for pattern, found in _PATTERNS if pattern.match(head)), None)


def read_format(source: Source, where: str, wanted: Kind) -> FileFormat:
    """Return the format of a file that is to be read as `wanted`. A video can be read as audio.

    where: name of the item in errors. Raises AudioError, ImageError or VideoError for a file of
    another kind, and for a format that is not read, which it names.
    """
    error, name = _ERRORS[wanted], name_of(source)
    with open_media(source, where, error) as file:
        found = file_format(file.read(HEAD_BYTES))
    file_name = "FILE" if isinstance(source, bytes) else name
    convert = _CONVERT[wanted].format(file_name)
    if found is None:
        known = PICTURE_NAMES if wanted == "image" else VIDEO_NAMES
        known = f"{SOUND_NAMES}, {known}" if wanted == "audio" else known
        raise error(
            f"{where}: {name} is something else, or broken at its beginning: {known} are read as "
            f"{wanted}. {convert}."
        )
    if found.library is None:
        raise error(
            f"{where}: {name} is {found.name}, which is not read. "
            f"{_CONVERT[found.kind].format(file_name)}."
        )
    fits = found.kind == wanted or (found.kind, wanted) == ("video", "audio")
    # A file that begins as M4A may have a video, too.
    if not fits and (found.name, wanted) != ("M4A", "video"):
        raise error(
            f"{where}: {name} is {_ANOTHER[found.kind].format(found.name, _WANTED[wanted])}."
        )
    return found
