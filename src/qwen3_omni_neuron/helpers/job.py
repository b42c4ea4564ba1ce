"""Jobs of the decoders, and their results."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from qwen3_omni_neuron.errors import AudioError, ImageError, InputError, OptionError, VideoError
from qwen3_omni_neuron.prompt.media.sizes import MediaSettings

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

    content: the file; of a video that is given as pictures, `joined` content. pictures: their
    number, 0 for a file. where: names the item in errors, e.g. "messages[0].content[1]". media: the
    checkpoint's settings (Qwen3Omni.media_settings). most_tokens: maximum number of tokens of
    sound. vision_tokens: tokens to which an image or video is shrunk, if it may be. most_s,
    most_pixels: maximum duration, and pixels of an image or frame. None: no maximum. frames: number
    of frames of a video that is not shrunk, None if they are not counted yet.
    use_audio_in_video: whether a video's audio is wanted. options: other fields of the item in
    the message, for files, such as fps and max_pixels; JSON values. size_alone:
    nothing is decoded, its size is read.
    """

    kind: Kind
    content: bytes = field(repr=False)
    where: str
    media: MediaSettings
    most_tokens: int | None = None
    vision_tokens: int | None = None
    frames: int | None = None
    most_s: float | None = None
    most_pixels: int | None = None
    use_audio_in_video: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    pictures: int = 0
    size_alone: bool = False

    @property
    def files(self) -> list[bytes]:
        """The pictures' files, of a video that is given as pictures."""
        begin = 4 * self.pictures
        sizes = struct.unpack(f"<{self.pictures}I", self.content[:begin])
        ends = list(accumulate(sizes, initial=begin))
        return [self.content[start:end] for start, end in pairwise(ends)]


def joined(files: Sequence[bytes]) -> bytes:
    """Return the content of a job whose video is given as these pictures."""
    return b"".join((struct.pack(f"<{len(files)}I", *map(len, files)), *files))


@dataclass(frozen=True)
class Measured:
    """Sizes of an item, from its header, before anything is decoded.

    seconds: duration of audio or video. pixels: pixels of an image, or of one video frame. size:
    bytes of the result.
    """

    seconds: float
    pixels: int
    size: int


Admit = Callable[[Measured], object]
"""Function that gets the sizes of an item, and raises if it does not fit."""


def admit_all(measured: Measured) -> None:
    """Admit every item: the default."""


@dataclass(frozen=True)
class Decoded:
    """Item of a message for the API. It gives the same prompt as the file itself.

    measured: its sizes after decoding. warnings: see prompt.media.fields.Warn.
    """

    item: dict[str, Any] = field(repr=False)
    measured: Measured
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolSettings:
    """Limits of a pool.

    decoders: processes that decode at a time. memory_bytes: address space of one process, beyond
    that at its start. deadline_s: time limit of one process; its CPU time limit is twice that.
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
