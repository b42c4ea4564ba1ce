"""Turns of a conversation: messages, and replies of which only a part may have been heard."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import format_value
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished, TextDelta
from qwen3_omni_neuron.prompt.media.clip import Clip, GrowingClip
from qwen3_omni_neuron.prompt.media.fields import real_number
from qwen3_omni_neuron.prompt.media.items import Media

BYTES_PER_S = 15.0  # UTF-8 text spoken: English has 14 to 17, Chinese (3 a character) 12 to 15
RATE_WEIGHT_S = 2.0  # weight of BYTES_PER_S, in seconds of the session's speech
_MOST_STORED = 1e12  # limit of a stored reply's numbers, whose products stay finite
ROUNDING_S = 1e-3
"""Tolerance of the seconds heard that a caller gives, which may be rounded to milliseconds."""


@dataclass(eq=False)
class Turn:
    """Message of a session's history, as given by the caller and as checked; see `Session.read`.

    given, checked: content, a string or a list of items; `given` holds a growing clip itself.
    calls: an assistant's calls of tools. said: True for the text of a reply, in which names of
    special tokens are words that the model wrote. id: name that the caller may give it.
    """

    role: str
    given: Any = None
    checked: Any = None
    media: list[Media] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    said: bool = False
    id: str | None = None

    def add(self, given: Any, checked: Any, media: Sequence[Media]) -> None:
        """Append content to the present content."""
        if self.given is None:
            self.given, self.checked = given, checked
        else:
            self.given = [*_items(self.given), *_items(given)]
            self.checked = [*_items(self.checked), *_items(checked)]
        self.media = [*self.media, *media]

    @property
    def message(self) -> dict[str, Any]:
        """The message as `Qwen3Omni.stream` takes it."""
        content = self.given
        if not isinstance(content, str):
            content = [
                {"type": "audio", **_samples(x)} if isinstance(x, GrowingClip) else dict(x)
                for x in content
            ]
        return self._message(content)

    @property
    def read(self) -> dict[str, Any]:
        """The message for a chat template."""
        return self._message(self.checked)

    @property
    def stored(self) -> dict[str, Any]:
        """The message with its media as they were prepared; see `MediaLoader.prepared`."""
        content = self.checked
        if not isinstance(content, str):
            media = iter(self.media)
            content = [x if x["type"] == "text" else next(media).item for x in content]
        return self._message(content) | {"id": self.id}

    def _message(self, content: Any) -> dict[str, Any]:
        made = {"role": self.role, "content": content}
        return made | ({"tool_calls": self.calls} if self.calls else {})


class Reply:
    """Reply in a session's history: the text and the seconds of audio that the caller got.

    Only the stream's reader adds to it. spoken: False for a reply in text alone. bytes_per_s: pace
    of the speech in earlier replies. ended: no event follows. complete: the caller got its last
    event, and not only those before a barge-in or an error. heard_s: seconds that the listener
    heard, None if unknown. spoken_bytes: size in UTF-8 of the text if the talker ended the speech
    by itself, else 0. id: name that the caller may give it.
    """

    role = "assistant"

    def __init__(self, spoken: bool, bytes_per_s: float):
        self.id: str | None = None
        self.spoken, self._bytes_per_s = spoken, bytes_per_s
        self.ended = self.complete = False
        self.audio_s = 0.0
        self.heard_s: float | None = None
        self.spoken_bytes = 0
        self._deltas: list[str] = []  # whole characters, of one or several tokens each

    @staticmethod
    def of(stored: Mapping[str, Any]) -> "Reply":
        """Return the reply that `stored` describes, which has ended.

        Raises KeyError, TypeError or ValueError for other values.
        """
        reply = Reply(_flag(stored["spoken"]), quantity(stored["bytes_per_s"]))
        reply.ended, reply.complete = True, _flag(stored["complete"])
        reply.audio_s = quantity(stored["audio_s"])
        if stored["heard_s"] is not None:
            reply.heard_s = quantity(stored["heard_s"])
        reply.spoken_bytes = int(quantity(stored["spoken_bytes"]))
        reply._deltas = list(stored["deltas"])
        "".join(reply._deltas).encode()  # they are strings, without half a surrogate pair
        reply.id = id_of(stored)
        return reply

    @property
    def stored(self) -> dict[str, Any]:
        """The reply as JSON values; one that still streams as if it had been stopped now."""
        return {
            "spoken": self.spoken,
            "bytes_per_s": self._bytes_per_s,
            "complete": self.complete,
            "audio_s": self.audio_s,
            "heard_s": self.heard_s,
            "spoken_bytes": self.spoken_bytes,
            "deltas": list(self._deltas),
            "id": self.id,
        }

    def add(self, event: Event) -> None:
        """Record an event that the caller gets."""
        if isinstance(event, TextDelta):
            self._deltas.append(event.text)
        elif isinstance(event, AudioChunk):
            self.audio_s += len(event.samples) / SAMPLE_RATE
        elif isinstance(event, Finished):
            self.ended = self.complete = True
            if event.result.talker_finish_reason == "stop" and self.audio_s:
                self.spoken_bytes = len(event.result.text.encode())

    @property
    def text(self) -> str:
        """Text of the reply that stays in the history; see `Session.heard`."""
        whole = not self.spoken or (self.complete and self.heard_s is None)
        heard_s = self.audio_s if self.heard_s is None else self.heard_s
        if whole or (self.complete and heard_s >= self.audio_s - ROUNDING_S):
            return "".join(self._deltas)
        own = self.spoken_bytes / self.audio_s if self.spoken_bytes else self._bytes_per_s
        heard_bytes, kept, end = heard_s * own, [], 0
        for text in list(self._deltas):
            size = len(text.encode())
            if end + size / 2 > heard_bytes:
                break
            end += size
            kept.append(text)
        return "".join(kept)


def id_of(stored: Mapping[str, Any]) -> str | None:
    """Return the id of a stored turn or reply. Raises KeyError and TypeError."""
    if not isinstance(stored["id"], str | None):
        raise TypeError("an id is not a string")
    return stored["id"]


def mean_pace(replies: Sequence[Reply]) -> float:
    """Return the bytes of text a second in a session's speech; BYTES_PER_S before there is any.

    Only replies whose speech the talker ended by itself count.
    """
    spoken = [reply for reply in replies if reply.spoken_bytes]
    text_bytes = BYTES_PER_S * RATE_WEIGHT_S + sum(reply.spoken_bytes for reply in spoken)
    return text_bytes / (RATE_WEIGHT_S + sum(reply.audio_s for reply in spoken))


def joined_turns(entries: Iterable[Turn | Reply | None]) -> list[Turn]:
    """Return the turns that the model reads, with replies as turns.

    A user's turn of images alone is joined to the user's turn after it, and calls of tools are
    joined to the assistant's turn before them. A reply of which nothing was heard is left out.
    """
    found: list[Turn] = []
    for entry in entries:
        if entry is None:
            continue
        turn = entry
        if isinstance(turn, Reply):
            turn = Turn("assistant", turn.text, turn.text, said=True)
        if turn.role == "assistant" and not (turn.given or turn.calls):
            continue
        if found and _join(found[-1], turn):
            found[-1] = _joined(found[-1], turn)
        else:
            found.append(turn)
    return found


def kept_content(content: Any, media: Sequence[Media]) -> Any:
    """Return a message's content to keep, with samples in place of audio arrays and iterators.

    media: the content's media, in order.
    """
    if isinstance(content, str):
        return str.__str__(content)
    kept, read = [], iter(media)
    for item in content:
        medium = None if item["type"] == "text" else next(read)
        clip = None if medium is None else medium.clip
        source = item.get("audio")
        if clip is None or source is None or isinstance(source, str | Path | bytes):
            kept.append(dict(item))
        else:
            kept.append({**item, **_samples(clip)})
    return kept


def _join(before: Turn, turn: Turn) -> bool:
    if turn.role != before.role:
        return False
    if turn.role == "user":
        return {item["type"] for item in _items(before.checked)} == {"image"}
    return bool(turn.role == "assistant" and turn.calls and not turn.checked)


def _joined(before: Turn, turn: Turn) -> Turn:
    made = Turn(before.role, before.given, before.checked, before.media, before.calls, before.said)
    if turn.role == "user":
        made.add(turn.given, turn.checked, turn.media)
    made.calls = [*before.calls, *turn.calls]
    return made


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{format_value(value)} is neither true nor false")
    return value


def quantity(value: Any) -> float:
    """Return a stored reply's number. Raises ValueError for none from 0 to _MOST_STORED."""
    number = real_number(value)
    if number is None or not 0 <= number <= _MOST_STORED:
        raise ValueError(f"{format_value(value)} is not a number from 0 to {_MOST_STORED:g}")
    return number


def _items(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _samples(clip: Clip) -> dict[str, Any]:
    return {"audio": clip.waveform, "sampling_rate": clip.rate}
