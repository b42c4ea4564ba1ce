"""Media of a request -> items of the API, decoded in other processes and within limits.

The model gets arrays only, never a file, nor a string that could be a path or a URL.
"""

import binascii
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.helpers.media.inline import decode_inline, picture_size
from qwen3_omni_neuron.helpers.media.job import Admit, Decoded, Job, Kind, Measured
from qwen3_omni_neuron.helpers.media.work import measured_picture
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.service import Service

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)((?:;[\w.+-]+=[\w.+-]+)*);base64,", re.ASCII)
Json = dict[str, Any]
Hold = Callable[[int], None]
"""Function that counts bytes before they are held, or raises ApiError."""
# The decoded data, the prompt's data, and computed inputs such as mel features.
_COPIES = 3


def sound_bytes(samples: NDArray[np.float32]) -> int:
    """Return the bytes that sound and its features take. samples: samples at 16 kHz."""
    return _COPIES * samples.nbytes


@dataclass
class _Pending:
    """Item that is not decoded yet. content: the file's bytes, or its URL."""

    item: Json
    kind: Kind
    content: bytes | str
    where: str


class MediaReader:
    """Reader of the media items of one request, or of one realtime item.

    `read` takes the items one by one; then `finish_inline` decodes plain PCM, and `finish` all
    others, each in a process of its own. warnings: sentences about the files that were decoded; see
    prompt.media.fields.Warn.
    """

    def __init__(
        self,
        service: Service,
        omni: Qwen3Omni,
        owner: str,
        hears_videos: bool = False,
        param: str = "messages",
        in_windows: bool = False,
    ):
        """hears_videos: the sound of videos is wanted, too. param: name of the field with media.

        in_windows: audio may be longer than the context.
        """
        self._service, self._settings, self._owner = service, service.settings, owner
        self._hears_videos, self._param = hears_videos, param
        self._omni, self._in_windows = omni, in_windows
        self._count, self._tokens = 0, 0
        self.warnings: list[str] = []
        self._items: list[_Pending] = []

    @property
    def pending(self) -> bool:
        """True if an item is not decoded yet."""
        return bool(self._items)

    def read(self, part: Mapping[str, Any], where: str) -> Json:
        """Return a content part as an item of the API, which decoding fills later.

        part: a part of type input_audio, audio_url, image_url or video_url. Raises ApiError.
        """
        kind: Kind = part["type"].removeprefix("input_").removesuffix("_url")
        if part["type"] == "input_audio":
            content: bytes | str = self._decoded(part["input_audio"]["data"], where)
        else:
            content = self._of_url(part[part["type"]]["url"], kind, where)
        return self._add(kind, content, where)

    def sound_file(self, content: bytes, where: str) -> Json:
        """Return a sound file as an audio item of the API; see `read`."""
        return self._add("audio", content, where)

    def finish_inline(self, hold: Hold) -> bool:
        """Decode the items that need no codec and little time. Returns whether none are left.

        hold: called before memory is used. Raises ApiError and the API's errors.
        """
        while self._items:
            found = self._items[0]
            if isinstance(found.content, str):
                return False
            decoded = decode_inline(self._job(found, found.content), self._admit(found, hold))
            if decoded is None:
                return False
            self._take(decoded)
        return True

    async def finish(self, hold: Hold) -> None:
        """Fetch and decode the remaining items, in their order; see `finish_inline`.

        Pictures are counted before the first item waits for a decoder, so that a request that does
        not fit is refused at once.
        """
        admits = [self._admit(found, hold) for found in self._items]
        for found, admit in zip(self._items, admits, strict=True):
            self._admit_by_header(found, admit)
        for admit in admits:
            found = self._items[0]
            content = found.content
            if isinstance(content, str):
                content, media_type = await self._service.fetcher.fetch(content, found.where)
                self._check_type(media_type, found.kind, found.where)
                hold(len(content))
            job = self._job(found, content)
            decode = self._service.decoder.decode
            self._take(await decode(self._owner, job, admit))

    def _admit_by_header(self, found: _Pending, admit: Admit) -> None:
        """Admit a picture whose header gives its size. Raises ApiError and the API's errors."""
        if found.kind == "image" and isinstance(found.content, bytes):
            size = picture_size(found.content)
            if size is not None:
                admit(measured_picture(self._job(found, found.content), *size))

    def _job(self, found: _Pending, content: bytes) -> Job:
        # The items before this one take their share of the context.
        left = max(0, self._omni.info.context_length - 1 - self._tokens)
        return Job(
            found.kind,
            content,
            found.where,
            self._omni.media_settings,
            most_tokens=None if self._in_windows else left,
            use_audio_in_video=self._hears_videos,
        )

    def _admit(self, found: _Pending, hold: Hold) -> Admit:
        """Return the function that checks an item's sizes and counts its bytes."""
        held = 0

        def admit(measured: Measured) -> None:
            nonlocal held
            most_s, most_pixels = self._settings.max_media_s, self._settings.max_pixels
            if measured.seconds > most_s:
                raise ApiError(
                    400,
                    f"{found.where} lasts {measured.seconds:.1f} s, and {most_s:g} s is the most. "
                    "Send a part of it.",
                    "media_too_long",
                    self._param,
                )
            if measured.pixels > most_pixels:
                raise ApiError(
                    400,
                    f"{found.where} has {measured.pixels} pixels, and {most_pixels} is the most. "
                    "Shrink it.",
                    "media_too_large",
                    self._param,
                )
            more = max(0, _COPIES * measured.size - held)
            hold(more)
            held += more

        return admit

    def _take(self, decoded: Decoded) -> None:
        """Fill the first pending item."""
        item = decoded.item
        self.warnings += decoded.warnings
        self._items.pop(0).item.update(item)
        media = self._omni.media_settings
        if item["type"] == "audio":
            seconds = len(item["audio"]) / media.audio_rate
            self._tokens += int(seconds * media.audio_tokens_per_s)
        else:
            sizes, shape = media.sizes, item[item["type"]].shape
            frames = 1 if item["type"] == "image" else shape[0] // sizes.temporal_patch_size
            area = (sizes.patch_size * sizes.merge_size) ** 2
            self._tokens += frames * math.prod(shape[-3:-1]) // area

    def _add(self, kind: Kind, content: bytes | str, where: str) -> Json:
        self._count += 1
        if self._count > self._settings.max_media:
            raise ApiError(
                400,
                f"the request has more than {self._settings.max_media} media items. Leave some "
                "out, or send them in several requests.",
                "too_many_media",
                self._param,
            )
        if isinstance(content, bytes) and len(content) > self._settings.max_media_bytes:
            raise self._too_large(where)
        item: Json = {"type": kind}
        self._items.append(_Pending(item, kind, content, where))
        return item

    def _of_url(self, url: str, kind: str, where: str) -> bytes | str:
        """Return the content of a data URL, or any other URL unchanged."""
        if url[:5].lower() != "data:":
            self._service.fetcher.check(url, where)
            return url
        head = _DATA_URL.match(url)
        if head is None:
            raise ApiError(
                400,
                f"{where} has a data URL that is not of the form data:TYPE;base64,CONTENT.",
                "invalid_media_url",
                self._param,
            )
        self._check_type(head[1].lower(), kind, where)
        return self._decoded(url[head.end() :], where)

    def _check_type(self, media_type: str, kind: str, where: str) -> None:
        allowed = [f"{kind}/", "application/octet-stream", "application/ogg"]
        if kind == "audio":  # what browsers and systems call such a file by its name alone
            allowed += ["video/webm", "video/mp4"]
        if not media_type.startswith(tuple(allowed)):
            raise ApiError(
                400,
                f"{where} is {kind}, and its content says that it is {media_type[:80]}. Give it "
                f"the type {kind}/..., or send it as what it is.",
                "invalid_media_type",
                self._param,
            )

    def _decoded(self, text: str, where: str) -> bytes:
        """Decode base64."""
        most = self._settings.max_media_bytes
        if len(text) > (most + 2) // 3 * 4:
            raise self._too_large(where)
        try:
            return pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(
                400,
                f"{where} is not base64 ({error}). Encode the file's bytes in one piece.",
                "invalid_base64",
                self._param,
            ) from error

    def _too_large(self, where: str) -> ApiError:
        return ApiError(
            413,
            f"{where} has more than {self._settings.max_media_bytes} bytes, the most for one item. "
            "Send less.",
            "media_too_large",
            self._param,
        )
