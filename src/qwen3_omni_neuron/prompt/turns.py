"""Turns of a conversation: messages, and replies, perhaps heard in part."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished, ShortRepr, TextDelta
from qwen3_omni_neuron.prompt.media.items import Media
from qwen3_omni_neuron.prompt.media.log_mel import GrowingClip

BYTES_PER_S = 15.0  # spoken UTF-8: English 14 to 17, Chinese (3 a character) 12 to 15
RATE_WEIGHT_S = 2.0  # weight of BYTES_PER_S, in seconds of the session's speech
ROUNDING_S = 1e-3
"""Tolerance of a caller's seconds, which may be rounded to milliseconds."""


@dataclass(eq=False, repr=False, kw_only=True)
class CallerData(ShortRepr):
    """The caller's data about a turn: stored with it, otherwise unused.

    shown: JSON values and arrays. size: bytes counted for the turn.
    """

    id: str | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def keep(self, stored: Mapping[str, Any]) -> None:
        """Read this data from a stored turn. Earlier versions stored only the id."""
        self.id, self.shown = stored["id"], stored.get("shown", {})
        self.size = stored.get("size", 0)


@dataclass(eq=False, repr=False)
class Turn(CallerData):
    """Message of a session's history; see `Session.read`.

    given, checked: content, a string or a list of items; `given` has a growing clip itself.
    calls: tool calls. said: True for a reply, whose special tokens' names are words.
    """

    role: str
    given: Any = None
    checked: Any = field(default=None, repr=False)
    media: list[Media] = field(default_factory=list, repr=False)
    calls: list[Any] = field(default_factory=list)
    said: bool = False

    def add(self, given: Any, checked: Any, media: Sequence[Media]) -> None:
        """Append content."""
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
                {"type": "audio", **x.item} if isinstance(x, GrowingClip) else dict(x)
                for x in content
            ]
        return self._message(content)

    @property
    def read(self) -> dict[str, Any]:
        """The message for a chat template."""
        return self._message(self.checked)

    @property
    def stored(self) -> dict[str, Any]:
        """The message with its prepared media; see `MediaLoader.prepared`."""
        content = self.checked
        if not isinstance(content, str):
            media = iter(self.media)
            content = [x if x["type"] == "text" else next(media).item for x in content]
        kept = {"id": self.id, "shown": self.shown, "size": self.size}
        return self._message(content) | kept

    def _message(self, content: Any) -> dict[str, Any]:
        made = {"role": self.role, "content": content}
        return made | ({"tool_calls": self.calls} if self.calls else {})


@dataclass(eq=False, repr=False)
class Reply(CallerData):
    """Reply in a session's history: the text and audio that the caller got.

    bytes_per_s: pace of earlier replies. ended: no event follows. complete: the caller got the last
    event. heard_s: None if unknown. spoken_bytes: of the text if the talker ended the speech, else
    0. rewritten: see `rewrite`. sent_s: seconds of sound sent to the client, at `speed` times the
    reply's own.
    """

    role: ClassVar[str] = "assistant"
    spoken: bool
    bytes_per_s: float
    ended: bool = False
    complete: bool = False
    audio_s: float = 0.0
    heard_s: float | None = None
    spoken_bytes: int = 0
    deltas: list[str] = field(default_factory=list)
    rewritten: bool = False
    sent_s: float = 0.0
    speed: float = 1.0

    @staticmethod
    def of(stored: Mapping[str, Any]) -> "Reply":
        """Return the ended reply that `stored` describes."""
        return Reply(**{**stored, "ended": True})

    @property
    def stored(self) -> dict[str, Any]:
        """The reply as JSON values, as if stopped now."""
        return {**vars(self), "ended": True, "deltas": list(self.deltas)}

    def add(self, event: Event) -> None:
        """Record an event that the caller gets."""
        if isinstance(event, TextDelta):
            self.deltas.append(event.text)
        elif isinstance(event, AudioChunk):
            self.audio_s += len(event.samples) / SAMPLE_RATE
        elif isinstance(event, Finished):
            self.ended = self.complete = True
            if event.result.talker_finish_reason == "stop" and self.audio_s:
                self.spoken_bytes = len(event.result.text.encode())

    def rewrite(self, text: str) -> None:
        """Replace the text; it counts as spoken evenly over the sent sound."""
        self.deltas, self.rewritten, self.spoken_bytes = [text], True, 0

    @property
    def text(self) -> str:
        """The text that stays in the history; see `Session.heard`."""
        if self.rewritten:
            text, share, sent_s = "".join(self.deltas), 1.0, self.sent_s * self.speed
            if self.heard_s is not None and sent_s:
                share = min(1.0, self.heard_s / sent_s)
            return text[: round(share * len(text))]
        whole = not self.spoken or (self.complete and self.heard_s is None)
        heard_s = self.audio_s if self.heard_s is None else self.heard_s
        if whole or (self.complete and heard_s >= self.audio_s - ROUNDING_S):
            return "".join(self.deltas)
        own = self.spoken_bytes / self.audio_s if self.spoken_bytes else self.bytes_per_s
        heard_bytes, kept, end = heard_s * own, [], 0
        for text in list(self.deltas):
            size = len(text.encode())
            if end + size / 2 > heard_bytes:
                break
            end += size
            kept.append(text)
        return "".join(kept)


def mean_pace(replies: Sequence[Reply]) -> float:
    """Return the bytes of text per second of speech that the talker ended."""
    spoken = [reply for reply in replies if reply.spoken_bytes]
    text_bytes = BYTES_PER_S * RATE_WEIGHT_S + sum(reply.spoken_bytes for reply in spoken)
    return text_bytes / (RATE_WEIGHT_S + sum(reply.audio_s for reply in spoken))


def joined_turns(entries: Iterable[Turn | Reply | None]) -> list[Turn]:
    """Return the turns that the model reads, with replies as turns.

    A user's turn of images alone joins the user's next turn, tool calls the assistant's turn before
    them. An unheard reply is left out.
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
    """Return a message's content to store, with samples for audio arrays and iterators."""
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
            kept.append({**item, **clip.item})
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


def _items(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
