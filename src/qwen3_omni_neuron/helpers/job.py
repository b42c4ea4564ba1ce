"""Jobs of the decoders, and their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qwen3_omni_neuron.errors import AudioError, ImageError, InputError, VideoError
from qwen3_omni_neuron.prompt.media.pixels import MediaSettings

Kind = Literal["audio", "image", "video"]
ERRORS: Mapping[str, type[InputError]] = {
    "audio": AudioError,
    "image": ImageError,
    "video": VideoError,
}
"""Error class by kind of item."""
MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """One media file to decode.

    content: the file, or the files of a video's frames. where: names the item in errors, e.g.
    "messages[0].content[1]". media: the checkpoint's settings (Qwen3Omni.media_settings).
    most_tokens: limit of audio tokens; None: no limit. use_audio_in_video: decode a video's audio,
    too. options: the item's other fields in the message, such as fps and max_pixels; JSON values.
    """

    kind: Kind
    content: bytes | Sequence[bytes] = field(repr=False)
    where: str
    media: MediaSettings
    most_tokens: int | None = None
    use_audio_in_video: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def item(self) -> dict[str, Any]:
        """The file or frames as an item of a message."""
        return {**self.options, self.kind: self.content}


@dataclass(frozen=True)
class Measured:
    """Sizes of an item, from its header, before decoding.

    seconds: duration of audio or video. pixels: number in an image or a video frame. size: bytes of
    the result.
    """

    seconds: float
    pixels: int
    size: int


Admit = Callable[[Measured], object]
"""Callback that gets an item's sizes, and raises if it does not fit."""


@dataclass(frozen=True)
class Decoded:
    """Item of a message with the same prompt as the file itself.

    warnings: see prompt.media.fields.Warn.
    """

    item: dict[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = ()
