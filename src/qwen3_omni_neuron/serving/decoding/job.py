"""Jobs of the decoders, and what comes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qwen3_omni_neuron.errors import AudioError, ImageError, InputError, OptionError, VideoError
from qwen3_omni_neuron.prompt.media.settings import MediaSettings

Kind = Literal["audio", "image", "video"]
ERRORS: Mapping[str, type[InputError]] = {
    "audio": AudioError,
    "image": ImageError,
    "video": VideoError,
}
"""Class of what is wrong with an item, by its kind."""
MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """One media file to decode.

    content: the file. where: names the item in errors, e.g. "messages[0].content[1]". media: the
    checkpoint's settings (Qwen3Omni.media_settings). most_tokens, most_s, most_pixels: maximum of
    the tokens it may become, of its length, and of the pixels of an image or frame; None: any.
    use_audio_in_video: whether a video's audio is wanted. options: other fields of the message's
    item, for files: fps, max_frames, min_pixels, max_pixels; of what JSON can hold.
    """

    kind: Kind
    content: bytes = field(repr=False)
    where: str
    media: MediaSettings
    most_tokens: int | None = None
    most_s: float | None = None
    most_pixels: int | None = None
    use_audio_in_video: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Sizes of an item, which its header gives before anything is decoded.

    seconds: of audio or video. pixels: of an image, or of a video's frame. size: bytes that the
    result takes.
    """

    seconds: float
    pixels: int
    size: int


Admit = Callable[[Measured], object]
"""Function that gets the sizes of an item, and raises where there is no room for it."""


def admit_all(measured: Measured) -> None:
    """Admit every item: the default."""


@dataclass(frozen=True)
class Decoded:
    """Item for a message of the API, of which the same prompt is made as of the file itself.

    measured: its sizes as it is.
    """

    item: dict[str, Any] = field(repr=False)
    measured: Measured


@dataclass(frozen=True)
class PoolSettings:
    """Limits of a pool.

    decoders: processes that decode at a time. memory_bytes: address space of one, beyond what it
    has from its start. deadline_s: time of one; it may use twice as much of processors' time.
    """

    decoders: int = 2
    memory_bytes: int = 1024 * MIB
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the values. Raises OptionError."""
        if self.decoders < 1:
            raise OptionError(f"decoders is 1 or more, got {self.decoders}.")
        if self.memory_bytes < 64 * MIB:
            raise OptionError(f"memory_bytes is {64 * MIB} or more, got {self.memory_bytes}.")
        if not self.deadline_s > 0:
            raise OptionError(f"deadline_s is above 0, got {self.deadline_s}.")
