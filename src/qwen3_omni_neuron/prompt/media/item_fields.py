"""Fields of audio, image and video items beside the medium: one table for Python and HTTP.

The names are those of qwen-omni-utils and, for `detail`, of OpenAI's API. What is not in the table
is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen3_omni_neuron.errors import did_you_mean, format_value
from qwen3_omni_neuron.prompt.media.fields import real_number, whole_number

DETAILS = ("auto", "low", "high", "original")
MOST_PIXELS = 2**62  # larger limits are reduced to this, which fits a float and 64 bits
MOST_SIDE = 1 << 20
_MOST_FRAMES = 2**31 - 1
_MOST_SECONDS = 1e9
# One frame in 11 days is slower than any time lapse, and its positions still fit float32.
LEAST_FPS, MOST_FPS = 1e-6, 1e6

Refusal = Callable[[str, str | None], Exception]
"""Function (message, name) that makes the error for a field. name: None for several fields."""


@dataclass(frozen=True)
class FieldValues:
    """Values that a field takes.

    phrase: the values, after "it is". read: returns the value to use, None for a wrong one. schema:
    the values in the words of JSON Schema.
    """

    phrase: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ItemField:
    """Field of media items.

    kinds: kinds of item that have it. help: its meaning. of_files: whether it is for files alone,
    and refused beside frames. over_http: whether parts of a request have it, too.
    """

    name: str
    kinds: tuple[str, ...]
    help: str
    values: FieldValues
    of_files: bool = False
    over_http: bool = True


def _whole(least: int, most: int, phrase: str) -> FieldValues:
    """Return integers from `least` on. Larger ones than `most` become it."""

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
    """Read a number of pixels, which qwen-omni-utils also takes with a fraction."""
    number = whole_number(value)
    if number is None:
        real = real_number(value)
        number = None if real is None else int(real)
    return None if number is None or number < 1 else min(number, MOST_PIXELS)


def _as_it_is(value: Any) -> Any:
    """Return a value that the reader of the medium checks."""
    return value


_SEEN, _VIDEO, _AUDIO = ("image", "video"), ("video",), ("audio",)
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
_PAIRED = _whole(2, _MOST_FRAMES, "an integer of 2 or more, since frames are taken in pairs")
_SECONDS = _real(0, _MOST_SECONDS, f"a number of seconds from 0 to {_MOST_SECONDS:g}")
_HERTZ, _SOUND = FieldValues("a number of Hz", _as_it_is), FieldValues("sound", _as_it_is)

ITEM_FIELDS = (
    ItemField("detail", _SEEN, "how large it is seen: low takes few tokens", _DETAIL),
    ItemField("min_pixels", _SEEN, "least pixels of an image or a frame after resizing", _PIXELS),
    ItemField("max_pixels", _SEEN, "most pixels of an image or a frame after resizing", _PIXELS),
    ItemField("total_pixels", _VIDEO, "most pixels of all pairs of frames after resizing", _TOTAL),
    ItemField("resized_height", _SEEN, "height after resizing, rounded to whole tokens", _SIDE),
    ItemField("resized_width", _SEEN, "width after resizing, rounded to whole tokens", _SIDE),
    ItemField("fps", _VIDEO, "frames sampled a second; of frames, their rate", _RATE),
    ItemField("sample_fps", _VIDEO, "the rate of frames, as fps", _RATE, over_http=False),
    ItemField("nframes", _VIDEO, "frames sampled in all, in place of fps", _PAIRED, of_files=True),
    ItemField("min_frames", _VIDEO, "least frames sampled, with fps", _FRAMES, of_files=True),
    ItemField("max_frames", _VIDEO, "most frames sampled, with fps", _PAIRED, of_files=True),
    ItemField("video_start", _VIDEO, "second at which the part begins", _SECONDS, of_files=True),
    ItemField("video_end", _VIDEO, "second at which the part ends", _SECONDS, of_files=True),
    ItemField("audio_start", _AUDIO, "second at which the part begins", _SECONDS),
    ItemField("audio_end", _AUDIO, "second at which the part ends", _SECONDS),
    ItemField(
        "sampling_rate", ("audio", "video"), "rate of samples in Hz", _HERTZ, over_http=False
    ),
    ItemField("audio", _VIDEO, "sound in place of the file's", _SOUND, over_http=False),
)
_ELSEWHERE = {
    "use_audio_in_video": "It is an option of the request, not of an item",
    "sample_fps": "The rate of frames is fps",
    "raw_fps": "The rate of frames is fps",
}


def fields_of(kind: str, over_http: bool = False) -> dict[str, ItemField]:
    """Return the fields of a kind of item by name: those in Python, or those over HTTP."""
    return {f.name: f for f in ITEM_FIELDS if kind in f.kinds and (f.over_http or not over_http)}


def read_fields(
    kind: str,
    given: Mapping[str, Any],
    where: str,
    refusal: Refusal,
    over_http: bool = False,
    of_file: bool = True,
) -> dict[str, Any]:
    """Return the checked fields of an item, without those that are None.

    given: its fields, without its type and its medium. where: name of the item in errors. of_file:
    whether its medium is a file, not frames.
    Raises the error that `refusal` makes for an unknown field, a wrong value, or fields that
    contradict each other.
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
                f"{where} has {name}, which is for a file, and the {kind} is frames. Leave it out, "
                "and choose the frames yourself.",
                name,
            )
        made[found.name] = checked = found.values.read(value)
        if checked is None:
            message = f"{where} has {name} {format_value(value)}; it is {found.values.phrase}."
            raise refusal(message, name)
    for message, wrong in _contradictions(made):
        raise refusal(f"{where} has {message}", wrong)
    return made


def unknown_name(name: Any, known: list[str]) -> str:
    """Return the end of a sentence about an unknown field, with a hint. known: all names."""
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
    """Yield what is wrong with several fields together, and the field to change."""
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
