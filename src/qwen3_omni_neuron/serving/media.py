"""Media of a request -> bytes, checked for their size before anything is decoded.

What the model gets is bytes, never a string that could be a path or a URL.
"""

import binascii
import io
import re
from collections.abc import Mapping
from typing import Any

import pybase64

from qwen3_omni_neuron.serving.errors import ApiError
from qwen3_omni_neuron.serving.fetching import Fetcher
from qwen3_omni_neuron.serving.settings import ServerSettings

SOUND_INPUTS = ("wav", "mp3", "flac", "ogg", "opus")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)((?:;[\w.+-]+=[\w.+-]+)*);base64,", re.ASCII)


class MediaReader:
    """Reader of the media items of one request."""

    def __init__(self, settings: ServerSettings, fetcher: Fetcher):
        self._settings, self._fetcher = settings, fetcher
        self._count = 0

    def read(self, part: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a content part as an item of the API. Raises ApiError.

        part: of type input_audio, audio_url, image_url or video_url.
        """
        self._count += 1
        if self._count > self._settings.max_media:
            raise ApiError(
                400,
                f"the request has more than {self._settings.max_media} media items. Leave some "
                "out, or send them in several requests.",
                "too_many_media",
                "messages",
            )
        kind = part["type"].removeprefix("input_").removesuffix("_url")
        if part["type"] == "input_audio":
            content = self._decoded(part["input_audio"]["data"], where)
        else:
            content = self._of_url(part[part["type"]]["url"], kind, where)
        self._check(kind, content, where)
        return {"type": kind, kind: content}

    def _of_url(self, url: str, kind: str, where: str) -> bytes:
        if url[:5].lower() != "data:":
            content, media_type = self._fetcher.fetch(url, where)
        else:
            head = _DATA_URL.match(url)
            if head is None:
                raise ApiError(
                    400,
                    f"{where} has a data URL that is not of the form data:TYPE;base64,CONTENT.",
                    "invalid_media_url",
                    "messages",
                )
            content, media_type = self._decoded(url[head.end() :], where), head[1].lower()
        allowed = (f"{kind}/", "application/octet-stream", "application/ogg")
        if not media_type.startswith(allowed):
            raise ApiError(
                400,
                f"{where} is {kind}, and its content says that it is {media_type[:80]}. Give it "
                f"the type {kind}/..., or send it as what it is.",
                "invalid_media_type",
                "messages",
            )
        return content

    def _decoded(self, text: str, where: str) -> bytes:
        most = self._settings.max_media_bytes
        if len(text) > (most + 2) // 3 * 4:
            raise _too_large(where, most, "messages")
        try:
            return pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(
                400,
                f"{where} is not base64 ({error}). Encode the file's bytes in one piece.",
                "invalid_base64",
                "messages",
            ) from error

    def _check(self, kind: str, content: bytes, where: str) -> None:
        """Refuse what is too long or too large by its header; the rest is the model's to refuse."""
        if kind == "audio":
            check_sound(content, self._settings, where, "messages")
        elif kind == "image":
            _check_pixels(_image_pixels(content), self._settings.max_pixels, where)
        else:
            seconds, pixels = _video_size(content)
            _check_seconds(seconds, self._settings.max_media_s, where, "messages")
            _check_pixels(pixels, self._settings.max_pixels, where)


def check_sound(content: bytes, settings: ServerSettings, where: str, param: str) -> None:
    """Refuse a sound file that has too many bytes, or lasts too long by its header."""
    if len(content) > settings.max_media_bytes:
        raise _too_large(where, settings.max_media_bytes, param)
    _check_seconds(_audio_seconds(content), settings.max_media_s, where, param)


def _too_large(where: str, most: int, param: str) -> ApiError:
    return ApiError(
        413,
        f"{where} has more than {most} bytes, the most for one item. Send less.",
        "media_too_large",
        param,
    )


def _check_seconds(seconds: float, most_s: float, where: str, param: str) -> None:
    if seconds > most_s:
        raise ApiError(
            400,
            f"{where} lasts {seconds:.1f} s, and {most_s:g} s is the most. Send a part of it.",
            "media_too_long",
            param,
        )


def _check_pixels(pixels: int, most: int, where: str) -> None:
    if pixels > most:
        raise ApiError(
            400,
            f"{where} has {pixels} pixels, and {most} is the most. Shrink it.",
            "media_too_large",
            "messages",
        )


def _audio_seconds(content: bytes) -> float:
    import soundfile

    try:
        info = soundfile.info(io.BytesIO(content))
    except (soundfile.SoundFileError, OSError, TypeError):
        return 0.0
    return info.frames / info.samplerate if info.samplerate else 0.0


def _image_pixels(content: bytes) -> int:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as picture:
            return picture.width * picture.height
    except Image.DecompressionBombError:
        return 1 << 62
    except (
        Exception
    ):  # the decoders' exceptions have no common class; it is read again, and refused
        return 0


def _video_size(content: bytes) -> tuple[float, int]:
    """Return seconds and pixels of a frame, zeros where they can't be read."""
    try:
        import av
    except ImportError:
        return 0.0, 0
    try:
        # Without a protocol FFmpeg can't open what a playlist names.
        with av.open(io.BytesIO(content), "r", options={"protocol_whitelist": ""}) as container:
            seconds = (container.duration or 0) / av.time_base
            sizes = [s.width * s.height for s in container.streams.video]
            return seconds, max(sizes, default=0)
    except (av.FFmpegError, ValueError, OverflowError):
        return 0.0, 0
