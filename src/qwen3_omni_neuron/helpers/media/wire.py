"""Formats of the messages between the pool and a child that decodes.

The job and its answers are JSON after their length; the pool checks every number in an answer. One
byte lets the child continue.
"""

import json
import math
import struct
from dataclasses import asdict, dataclass
from typing import Any

from qwen3_omni_neuron.errors import InputError, OptionError, PromptTooLongError, printable
from qwen3_omni_neuron.helpers.media.job import ERRORS, Job, Measured
from qwen3_omni_neuron.prompt.media.sizes import MediaSettings, SizeLimits, Sizes, VisualSize

GO = b"g"
LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 16  # limit of an answer
MOST_JOB_BYTES = 4096  # a connection accepts this many at once on any system
MOST_CHARACTERS = 2000  # limit of an error's message, and of all warnings about an item
_MOST = 1 << 48  # limit of any number
_REFUSALS = {e.__name__: e for e in (*ERRORS.values(), PromptTooLongError)}


class BrokenAnswerError(Exception):
    """A child has sent a message that no intact child sends."""


@dataclass(frozen=True)
class Holding:
    """Sizes of a result: first the frames, uint8 [frames, height, width, 3], then the samples.

    frames, height, width: 0 without a picture. samples: number of float32 samples, 0 without sound.
    fps: frame rate of a video. fitted: the frames have the size that the checkpoint's processor
    gives them. warnings: see prompt.media.fields.Warn.
    """

    frames: int = 0
    height: int = 0
    width: int = 0
    samples: int = 0
    fps: float = 0.0
    fitted: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def pixel_bytes(self) -> int:
        """Size of the frames in bytes."""
        return self.frames * self.height * self.width * 3

    @property
    def size(self) -> int:
        """Size of frames and samples in bytes."""
        return self.pixel_bytes + 4 * self.samples


def packed(message: Any) -> bytes:
    """Return a message as JSON after its length."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def unpacked(data: bytes) -> dict[str, Any]:
    """Parse a child's message. Raises BrokenAnswerError."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise BrokenAnswerError("it is not a JSON object")
    return message


def job_message(job: Job, size_alone: bool) -> bytes:
    """Return a job's message, without its content. Raises OptionError for long options.

    size_alone: nothing is decoded, the size is read.
    """
    fields = {n: getattr(job, n) for n in job.__dataclass_fields__ if n not in ("content", "media")}
    fields |= {"options": dict(job.options), "media": asdict(job.media)}
    message = packed(fields | {"size_alone": size_alone})
    if len(message) > MOST_JOB_BYTES:
        raise OptionError(
            f"{printable(job.where, 100)} has options of {len(message)} bytes; {MOST_JOB_BYTES} "
            "is the most."
        )
    return message


def job_of(message: dict[str, Any], content: bytes) -> Job:
    """Return the job of a `job_message`."""
    media = message.pop("media")
    media = MediaSettings(**media | {"sizes": Sizes(**media["sizes"])})
    return Job(**message, media=media, content=content)


def shape_of(size: VisualSize) -> list[int]:
    """Return the numbers of an image or video for `size_of`."""
    return [size.height, size.width, size.frames or 0, size.sound_tokens]


def size_of(value: Any, job: Job) -> VisualSize:
    """Return the size that a child sends as `shape_of` has it. Raises BrokenAnswerError."""
    if not isinstance(value, list) or len(value) != 4:
        raise BrokenAnswerError("its shape is not four numbers")
    height, width = _whole(value[0], 1), _whole(value[1], 1)
    frames = None if job.kind == "image" else _whole(value[2], 1)
    asked = SizeLimits.of(job.options)
    return VisualSize(job.where, height, width, frames, asked, _whole(value[3], 0))


def measured_of(value: Any) -> Measured:
    """Return the sizes that a child sends as [seconds, pixels, bytes]. Raises BrokenAnswerError."""
    if not isinstance(value, list) or len(value) != 3:
        raise BrokenAnswerError("its sizes are not three numbers")
    seconds, pixels, size = value
    return Measured(_real(seconds, 0), _whole(pixels, 0), _whole(size, 0))


def holding_of(value: Any, kind: str) -> Holding:
    """Return the sizes of a result. kind: kind of the item. Raises BrokenAnswerError."""
    if not isinstance(value, dict) or value.keys() != Holding.__dataclass_fields__.keys():
        raise BrokenAnswerError("its result has other fields")
    sides = {n: _whole(value[n], 0) for n in ("frames", "height", "width", "samples")}
    if type(value["fitted"]) is not bool:
        raise BrokenAnswerError("whether its frames are fitted is not said")
    warnings = _warnings_of(value["warnings"])
    holding = Holding(
        **sides, fps=_real(value["fps"], 0), fitted=value["fitted"], warnings=warnings
    )
    seen, heard = kind != "audio", kind == "audio"
    if (holding.pixel_bytes > 0) is not seen or (heard and not holding.samples):
        raise BrokenAnswerError(f"its result is no {kind}")
    if kind == "image" and (holding.frames != 1 or holding.samples):
        raise BrokenAnswerError("its result is not an image")
    if kind == "video" and not holding.fps > 0:
        raise BrokenAnswerError("its video has no rate")
    return holding


def refusal_of(value: Any) -> InputError:
    """Return the error that a child sends as [class, message]. Raises BrokenAnswerError."""
    if not isinstance(value, list) or [type(v) for v in value] != [str, str]:
        raise BrokenAnswerError("its error is not two strings")
    name, message = value
    if name not in _REFUSALS:
        raise BrokenAnswerError("its error is of no known class")
    return _REFUSALS[name](printable(message, MOST_CHARACTERS))


def _warnings_of(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or any(type(warning) is not str for warning in value):
        raise BrokenAnswerError("its warnings are not strings")
    if sum(map(len, value)) > MOST_CHARACTERS:
        raise BrokenAnswerError("its warnings are too long")
    return tuple(printable(warning, MOST_CHARACTERS) for warning in value)


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise BrokenAnswerError(f"a size in it is not an integer from {least} to 2^48")
    return value


def _real(value: Any, least: float) -> float:
    if type(value) not in (int, float) or not least <= value <= _MOST or not math.isfinite(value):
        raise BrokenAnswerError(f"a number in it is not from {least:g} to 2^48")
    return float(value)
