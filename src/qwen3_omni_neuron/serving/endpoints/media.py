"""Media of a request -> items of the API, decoded in other processes within limits.

The model gets arrays only, never a file, path or URL.
"""

import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.helpers.job import Admit, Decoded, Job, Kind, Measured
from qwen3_omni_neuron.helpers.media import decode_inline
from qwen3_omni_neuron.prompt.media.fields import fields_of, read_fields
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import CHAT, names_in
from qwen3_omni_neuron.serving.service import Service

_URL = re.compile(r"data:|https?://", re.IGNORECASE)
_BASE64 = re.compile(r";\s*base64\s*\Z", re.IGNORECASE)
_MOST_HEAD = 512  # characters of a data URL before its content
Json = dict[str, Any]
Hold = Callable[[int], None]
"""Function that reserves bytes, or raises ApiError."""
# By a part's type: the field with the medium, and its kind.
_HOLDERS: Mapping[str, tuple[str, Kind]] = {
    "input_audio": ("input_audio", "audio"),
    "audio_url": ("audio_url", "audio"),
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "video_url": ("video_url", "video"),
}
_PICTURES_FPS = 2.0  # default rate of their frames, as DashScope's
_PART = "messages[].content[]"  # place of parts in the table of fields without effect
# Decoded data, the prompt's data, and computed inputs such as mel features.
_COPIES = 3


def sound_bytes(samples: int) -> int:
    """Return the bytes of sound and its features. samples: at 16 kHz."""
    return _COPIES * np.dtype(np.float32).itemsize * samples


@dataclass(eq=False)
class _Pending:
    """Item to decode.

    content: bytes or URL of the file, or of each picture of a video. options: see `Job`.
    """

    item: Json
    kind: Kind
    content: bytes | str | list[bytes | str]
    where: str
    options: Mapping[str, Any]


class MediaReader:
    """Reader of the media items of one request or realtime item.

    `read` accepts items one by one; then `finish_inline` decodes plain PCM, and `finish` all
    others, each in its own process. warnings: sentences about the decoded files.
    """

    def __init__(
        self,
        service: Service,
        omni: Qwen3Omni,
        owner: str,
        hears_videos: bool = False,
        param: str = "messages",
        in_windows: bool = False,
        fields: Mapping[str, Any] | None = None,
    ):
        """hears_videos: also decode videos' sound. param: field with media.

        in_windows: audio may exceed the context. fields: defaults of the items' fields.
        """
        self._service, self._settings, self._owner = service, service.settings, owner
        self._hears_videos, self._param = hears_videos, param
        self._omni, self._in_windows = omni, in_windows
        self._count, self._tokens, self._fields = 0, 0, fields or {}
        self.warnings: list[str] = []
        self._items: list[_Pending] = []

    @property
    def pending(self) -> bool:
        """True if an item is not decoded yet."""
        return bool(self._items)

    def read(self, part: Mapping[str, Any], where: str) -> Json:
        """Return a content part as an item of the API, which decoding fills later.

        part: of type input_audio, audio_url, image_url or video_url, of video with its frames'
        URLs, or of input_image with the URL as its image_url. Fields may be beside its object or
        inside. Raises ApiError, also for an unknown field (prompt.media.fields).
        """
        if part["type"] == "video":
            return self._read_pictures(part, where)
        holder, kind = _HOLDERS[part["type"]]
        held, place = part[holder], f"{where}.{holder}"
        if isinstance(held, str):
            held = {"url": held}
        else:
            place += ".data" if holder == "input_audio" else ".url"
        options = self._options(kind, part, held, holder, where)
        given = held["data" if holder == "input_audio" else "url"]
        plain = holder == "input_audio" and not _URL.match(given)
        content = self._decoded(given, place) if plain else self._of_url(given, place)
        return self.add(kind, content, where, options)

    def _read_pictures(self, part: Mapping[str, Any], where: str) -> Json:
        """Return a video of pictures: see `read`. Raises ApiError."""
        options = self._options("video", part, {}, "video", where)
        options.setdefault("fps", _PICTURES_FPS)
        contents, size = list[bytes | str](), 0
        for index, url in enumerate(part["video"]):
            place = f"{where}.video[{index}]"
            content = self._of_url(url, place)
            if isinstance(content, str):  # each is fetched
                self._count_item()
            else:
                size += len(content)
            contents.append(content)
        if size > self._settings.max_media_bytes:
            raise self._too_large(where)
        return self.add("video", contents, where, options)

    def _options(
        self, kind: Kind, part: Mapping[str, Any], held: Mapping[str, Any], holder: str, where: str
    ) -> Json:
        """Return the checked fields of a part, and of its object `held`, named `holder`.

        Raises ApiError.
        """
        given: Json = {}
        paths: dict[str, str] = {}
        for fields, path, place, own in (
            (part, where, _PART, ("type", holder)),
            (held, f"{where}.{holder}", f"{_PART}.{holder}", ("url", "data")),
        ):
            for name, value in fields.items():
                if value is None or name in own or name in names_in(CHAT, place):
                    continue
                if name in given and given[name] != value:
                    raise wrong_value(
                        f"{path}.{name} differs from {paths[name]}. Give one of them.",
                        f"{path}.{name}"[:200],
                    )
                given[name], paths[name] = value, f"{path}.{name}"

        def refusal(message: str, name: str | None) -> ApiError:
            return wrong_value(message, paths.get(name or "", where)[:200])

        of_file, known = holder != "video", fields_of(kind, over_http=True)
        for name, value in self._fields.items():
            if name not in known or name in given:
                continue
            if of_file or not (known[name].of_files or name == "fps"):  # fps: the frames' own rate
                given[name], paths[name] = value, f"mm_processor_kwargs.{name}"
        return read_fields(kind, given, where, refusal, over_http=True, of_file=of_file)

    def finish_inline(self, hold: Hold) -> bool:
        """Decode items that need no codec and little time. Returns whether none remain.

        hold: called before memory is used. Raises ApiError and the API's errors.
        """
        while self._items:
            found = self._items[0]
            if not isinstance(found.content, bytes):
                return False
            decoded = decode_inline(self._job(found, found.content), self._admit(found, hold))
            if decoded is None:
                return False
            self._take(found, decoded)
        return True

    async def finish(self, hold: Hold) -> None:
        """Fetch and decode the remaining items; see `finish_inline`."""
        while self._items:
            found = self._items[0]
            job = self._job(found, await self._content(found, hold))
            admit = self._admit(found, hold)
            self._take(found, await self._service.decoder.decode(self._owner, job, admit))

    async def _content(self, found: _Pending, hold: Hold) -> bytes | list[bytes]:
        """Return an item's file, or the files of a video's pictures; fetch URLs."""
        if not isinstance(found.content, list):
            return await self._file(found.content, found.where, hold)
        files = [
            await self._file(content, f"{found.where}.video[{index}]", hold)
            for index, content in enumerate(found.content)
        ]
        size = sum(map(len, files))
        if size > self._settings.max_media_bytes:
            raise self._too_large(found.where)
        hold(size)  # copied into one file
        return files

    async def _file(self, given: bytes | str, where: str, hold: Hold) -> bytes:
        if isinstance(given, bytes):
            return given
        content = await self._service.fetcher.fetch(given, where)
        hold(len(content))
        return content

    def _job(self, found: _Pending, content: bytes | list[bytes]) -> Job:
        # Earlier items use part of the context.
        left = max(0, self._omni.info.context_length - 1 - self._tokens)
        return Job(
            found.kind,
            content,
            found.where,
            self._omni.media_settings,
            most_tokens=None if self._in_windows else left,
            use_audio_in_video=self._hears_videos,
            options=found.options,
        )

    def _admit(self, found: _Pending, hold: Hold) -> Admit:
        """Return a function that checks an item's sizes and reserves its bytes."""
        held = 0

        def admit(measured: Measured) -> None:
            nonlocal held
            most_s, most, where = self._settings.max_media_s, self._settings.max_pixels, found.where
            if measured.seconds > most_s:
                message = f"{where} lasts {measured.seconds:.1f} s; the limit is {most_s:g} s."
                raise ApiError(400, f"{message} Send a part of it.", "media_too_long", where)
            if measured.pixels > most:
                message = f"{where} has {measured.pixels} pixels; the limit is {most}. Shrink it."
                raise ApiError(400, message, "media_too_large", where)
            more = max(0, _COPIES * measured.size - held)
            hold(more)
            held += more

        return admit

    def _take(self, found: _Pending, decoded: Decoded) -> None:
        self.warnings += decoded.warnings
        self._items.remove(found)
        found.content = b""  # frees it
        found.item.update(decoded.item)
        if found.kind == "audio" and not self._in_windows:
            samples = len(decoded.item["audio"])
            self._tokens += self._omni.prompt_builder.audio_tokens(samples)

    def add(
        self, kind: Kind, content: bytes | str | list[bytes | str], where: str, options: Json
    ) -> Json:
        """Return a file or URL as an item of the API."""
        self._count_item()
        if isinstance(content, bytes) and len(content) > self._settings.max_media_bytes:
            raise self._too_large(where)
        item: Json = {"type": kind}
        self._items.append(_Pending(item, kind, content, where, options))
        return item

    def _count_item(self) -> None:
        self._count += 1
        if self._count > self._settings.max_media:
            message = (
                f"the request has more than {self._settings.max_media} media items. Send fewer."
            )
            raise ApiError(400, message, "too_many_media", self._param)

    def _of_url(self, url: str, where: str) -> bytes | str:
        """Return a data URL's content, whatever its type, or another URL unchanged."""
        if url[:5].lower() != "data:":
            self._service.fetcher.check(url, where)
            return url
        end = url.find(",", 0, _MOST_HEAD)
        if end < 0 or not _BASE64.search(url[:end]):
            message = f"{where} must be a data URL of the form data:TYPE;base64,CONTENT."
            raise ApiError(400, message, "invalid_media_url", where)
        return self._decoded(url[end + 1 :], where)

    def _decoded(self, text: str, where: str) -> bytes:
        most = self._settings.max_media_bytes
        if len(text) > (most + 2) // 3 * 4:
            raise self._too_large(where)
        try:
            return pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            message = f"{where} is not base64 ({error}). Encode the file's bytes in one piece."
            raise ApiError(400, message, "invalid_base64", where) from error

    def _too_large(self, where: str) -> ApiError:
        message = f"{where} has more than {self._settings.max_media_bytes} bytes. Send less."
        return ApiError(413, message, "media_too_large", where)
