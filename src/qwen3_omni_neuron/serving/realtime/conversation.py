"""Items of a conversation as clients see them, each with the turn that the model reads."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen3_omni_neuron.serving.errors import ApiError
from qwen3_omni_neuron.serving.ids import new_id
from qwen3_omni_neuron.serving.media import MediaReader, sound_bytes
from qwen3_omni_neuron.serving.quotas import Account
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    Codec,
    Resampler,
    Samples,
    decoded_sound,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.events import (
    CallItem,
    Item,
    Json,
    MessageItem,
    OutputItem,
    Part,
    Reference,
)
from qwen3_omni_neuron.serving.reply_text import Call
from qwen3_omni_neuron.session import Reply, Session, Turn

RATE = 16000  # sample rate of sound in turns
ITEM_BYTES = 1024  # bytes that an item counts for beside its content
_EMPTY: Json = {"role": "user", "content": ""}


@dataclass(eq=False)
class Entry:
    """Item of the conversation.

    shown: the item as clients see it, without content if it is a reply. spoken: a reply's content
    is sound. audio_s: seconds of sound that the client was sent. size: bytes that it counts for.
    """

    id: str
    shown: Json
    turn: Turn | Reply
    size: int = ITEM_BYTES
    spoken: bool = False
    audio_s: float = 0.0
    status: str = "completed"

    @property
    def text(self) -> str:
        """Text of a reply. Its turn is no `Reply` once another text has replaced its own."""
        return self.turn.text if isinstance(self.turn, Reply) else self.turn.given

    @property
    def is_reply(self) -> bool:
        """True for a message that this server has generated."""
        return "content" not in self.shown and self.shown["type"] == "message"

    @property
    def json(self) -> Json:
        """The item as clients see it, without sound."""
        made = {"id": self.id, "object": "realtime.item", **self.shown, "status": self.status}
        if self.is_reply:
            made["content"] = [] if self.status == "in_progress" else [self._content()]
        return made

    def _content(self) -> Json:
        if self.spoken:
            return {"type": "output_audio", "transcript": self.text}
        return {"type": "output_text", "text": self.text}


@dataclass
class Draft:
    """A client's item while it is read, not yet in a turn.

    message: message for the session; its media may still have to be decoded. shown: the item as
    clients see it. account: the session's account. size: bytes that the item holds there.
    """

    id: str
    message: Json
    shown: Json
    account: Account
    size: int = 0

    def hold(self, size: int) -> None:
        """Count bytes of the item. Raises ApiError."""
        self.account.hold(size)
        self.size += size

    def drop(self) -> None:
        """Release the item's bytes."""
        self.account.release(self.size)
        self.size = 0


@dataclass
class Conversation:
    """Items of a session's turns, for one thread at a time. A turn's id is that of its item.

    account: bytes that the session holds. buffered: bytes of the user's unfinished turn.
    """

    session: Session
    account: Account
    id: str = field(default_factory=lambda: new_id("conv_"))
    buffered: int = 0
    _items: dict[str, Entry] = field(default_factory=dict)

    def hear(self, samples: Samples) -> None:
        """Append sound to the user's turn. Raises ApiError if the session holds too much."""
        size = sound_bytes(samples)
        self.account.hold(size)
        try:
            self.session.append_audio(samples, RATE)
        except BaseException:
            self.account.release(size)
            raise
        self.buffered += size

    def drop(self) -> None:
        """Drop the user's unfinished turn."""
        self.session.clear()
        self.account.release(self.buffered)
        self.buffered = 0

    def commit(self, item_id: str) -> tuple[Entry, str | None]:
        """End the user's turn. Returns its item, and the previous item's id. Raises ApiError."""
        if not self.buffered:
            raise ApiError(
                400,
                "the input audio buffer is empty. Append sound first; with server_vad, wait for "
                "speech_started.",
                "input_audio_buffer_commit_empty",
            )
        turn = self.session.commit()
        shown = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        self.account.add(ITEM_BYTES)
        entry = Entry(item_id, shown, turn, ITEM_BYTES + self.buffered)
        self.buffered = 0
        return entry, self._added(entry)

    def draft(self, item: Item, media: MediaReader, codec: Codec) -> Draft:
        """Read a client's item, except media that need decoding: see `MediaReader.finish`.

        Raises ApiError.
        """
        if item.id is not None and item.id in self._items:
            raise ApiError(
                400,
                f"there is an item {item.id[:80]!r} already. Take another id, or leave it out.",
                "item_already_exists",
                "item.id",
            )
        draft = _draft_of(item, self.account)
        try:
            draft.hold(ITEM_BYTES + _text_bytes(item))
            if isinstance(item, MessageItem):
                _read_content(draft, item, media, codec)
        except BaseException:
            draft.drop()
            raise
        return draft

    def create(self, draft: Draft, after: str | None) -> tuple[Entry, str | None]:
        """Insert an item into the conversation: at the end, after another one, or after "root".

        Returns it, and the previous item's id. Raises ApiError and the errors of the API.
        """
        before = None
        if after is not None:
            turns = self.session.turns
            at = 0 if after == "root" else turns.index(self._found(after, "previous_item_id").turn)
            later = turns[at + (after != "root") :]
            before = later[0] if later else None
        entry = self._entry(draft)
        self.session.insert(entry.turn, before)
        return entry, self._added(entry)

    def retrieve(self, item_id: str, codec: Codec) -> Json:
        """Return an item with the user's sound. Raises ApiError."""
        entry = self._found(item_id, "item_id")
        made = entry.json
        if isinstance(entry.turn, Turn) and not isinstance(entry.turn.message["content"], str):
            sounds = [x["audio"] for x in entry.turn.message["content"] if x["type"] == "audio"]
            parts = []
            for part in made.get("content", ()):
                if part["type"] == "input_audio":
                    part = {**part, "audio": _in_base64(sounds.pop(0), codec)}  # noqa: PLW2901
                parts.append(part)
            made["content"] = parts
        return made

    def delete(self, item_id: str) -> None:
        """Remove an item. Raises ApiError."""
        entry = self._found(item_id, "item_id")
        if entry.status == "in_progress":
            raise _still_made(item_id)
        self.forget(entry)

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Truncate a reply to the part that was heard. Raises ApiError."""
        entry = self._found(item_id, "item_id")
        if not (entry.is_reply and entry.spoken):
            message = f"item {item_id[:80]!r} is no reply in speech: only such can be truncated."
            raise ApiError(400, message, "invalid_value", "item_id")
        made = isinstance(entry.turn, Reply) and not entry.turn.ended  # its calls still follow
        if entry.status == "in_progress" or made:
            raise _still_made(item_id)
        if content_index:
            message = f"a reply has one part, of index 0, got {content_index}."
            raise ApiError(400, message, "invalid_value", "content_index")
        # Clients count whole ms, and may round up.
        if audio_end_ms > entry.audio_s * 1000 + 1:
            raise ApiError(
                400,
                f"audio_end_ms is {audio_end_ms}, and {int(entry.audio_s * 1000)} ms of the "
                "item's sound were sent. Give what was played of it.",
                "invalid_value",
                "audio_end_ms",
            )
        heard_s = min(audio_end_ms / 1000, entry.audio_s)
        if isinstance(entry.turn, Reply):
            self.session.heard(heard_s, entry.turn)
        else:
            self._replace_text(entry, entry.text, heard_s)

    def input_of(self, given: Sequence[Draft | Reference]) -> list[Turn | Reply]:
        """Return the turns of a response's own input. Raises ApiError."""
        return [
            self._found(item.id, "response.input").turn
            if isinstance(item, Reference)
            else self._entry(item).turn
            for item in given
        ]

    def answerable(self, turns: Sequence[Turn | Reply]) -> list[Turn | Reply]:
        """Return turns that end with a user's or tool's turn: append an empty one if needed."""
        if turns and turns[-1].role in ("user", "tool"):
            return list(turns)
        return [*turns, self.session.read(_EMPTY)]

    def begin_reply(self, reply: Reply, spoken: bool) -> tuple[Entry, str | None]:
        """Make the item of a reply in the history. Returns it, and the previous item's id.

        Clients are told of the item once it has content.
        """
        shown = {"type": "message", "role": "assistant"}
        entry = Entry(new_id("item_"), shown, reply, spoken=spoken, status="in_progress")
        self.account.add(entry.size)
        return entry, self._added(entry)

    def add_call(self, call: Call, after: Sequence[str]) -> tuple[Entry, str | None]:
        """Insert a reply's call after the last of the items with the given ids.

        Items that a client has deleted are ignored; if none is left, the call is the last item.
        """
        turns = self.session.turns
        left = [self._items[item_id].turn for item_id in after if item_id in self._items]
        later = turns[turns.index(left[-1]) + 1 :] if left else []
        item = CallItem(
            type="function_call", call_id=call.id, name=call.name, arguments=call.arguments
        )
        draft = _draft_of(item, self.account)
        draft.size = ITEM_BYTES + _text_bytes(item)
        self.account.add(draft.size)
        entry = self._entry(draft)
        self.session.insert(entry.turn, later[0] if later else None)
        return entry, self._added(entry)

    def settle(self, entry: Entry, text: str, as_it_is: bool) -> None:
        """End a reply's item. text: text that clients got. as_it_is: the reply has no other text.

        Otherwise reasoning, and calls with items of their own, are removed from the reply's text.
        Does nothing if a client has deleted the item.
        """
        if self._items.get(entry.id) is not entry:
            return
        size = sys.getsizeof(text)
        entry.size += size
        self.account.add(size)
        if not as_it_is:
            # A client may have reported heard seconds since the reply's last event.
            heard_s = entry.turn.heard_s if isinstance(entry.turn, Reply) else None
            self._replace_text(entry, text, heard_s)

    def forget(self, entry: Entry) -> None:
        """Remove an item of which clients were not told."""
        self.session.remove(entry.turn)
        self.account.release(entry.size)
        del self._items[entry.id]

    def samples_of(self, entry: Entry) -> Samples:
        """Return the sound of a committed item."""
        assert isinstance(entry.turn, Turn)
        sounds = [x["audio"] for x in entry.turn.message["content"] if x["type"] == "audio"]
        return np.concatenate(sounds)

    def _entry(self, draft: Draft) -> Entry:
        return Entry(draft.id, draft.shown, self.session.read(draft.message), draft.size)

    def _replace_text(self, entry: Entry, text: str, heard_s: float | None) -> None:
        """Replace a reply by this text, cut to the fraction that was heard; None: all of it."""
        share = 1.0 if heard_s is None or not entry.audio_s else heard_s / entry.audio_s
        heard = text[: round(share * len(text))]
        turn = self.session.read({"role": "assistant", "content": heard})
        turn.id = entry.id
        self.session.insert(turn, entry.turn)
        self.session.remove(entry.turn)
        entry.turn = turn

    def _added(self, entry: Entry) -> str | None:
        """Add an item whose turn is in the history. Returns the previous item's id."""
        self._items[entry.id] = entry
        entry.turn.id = entry.id
        turns = self.session.turns
        at = turns.index(entry.turn)
        return turns[at - 1].id if at else None

    def _found(self, item_id: str, param: str) -> Entry:
        entry = self._items.get(item_id)
        if entry is None:
            message = f"there is no item {item_id[:80]!r} in the conversation."
            raise ApiError(400, message, "item_not_found", param)
        return entry


def _text_bytes(item: Item) -> int:
    """Return the memory in bytes of an item's text and of its images as clients see them."""
    if isinstance(item, CallItem):
        texts: list[str | None] = [item.name, item.arguments]
    elif isinstance(item, OutputItem):
        texts = [item.output]
    else:
        texts = [t for part in item.content for t in (part.text, part.transcript, part.image_url)]
    return sum(sys.getsizeof(text) for text in texts if text is not None)


def _draft_of(item: Item, account: Account) -> Draft:
    item_id = item.id or new_id("item_")
    if isinstance(item, OutputItem):
        shown = {"type": item.type, "call_id": item.call_id, "output": item.output}
        return Draft(item_id, {"role": "tool", "content": item.output}, shown, account)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        calls = [{"type": "function", "function": function}]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        shown = {"type": item.type, "call_id": item.call_id or new_id("call_"), **function}
        return Draft(item_id, message, shown, account)
    message = {"role": item.role, "content": []}
    return Draft(item_id, message, {"type": "message", "role": item.role, "content": []}, account)


def _read_content(draft: Draft, item: MessageItem, media: MediaReader, codec: Codec) -> None:
    """Read a message's parts into its draft. Raises ApiError."""
    content: list[Json] = []
    for index, part in enumerate(item.content):
        made, told = _part(part, item.role, f"item.content.{index}", media, codec)
        if made["type"] == "audio":
            draft.hold(sound_bytes(made["audio"]))
        content.append(made)
        draft.shown["content"].append(told)
    texts_alone = item.role != "user"
    draft.message["content"] = "".join(x["text"] for x in content) if texts_alone else content


def _part(part: Part, role: str, where: str, media: MediaReader, codec: Codec) -> tuple[Json, Json]:
    """Return a part of a message's content for the API, and as clients see it."""
    text = part.text if part.type in ("input_text", "output_text") else part.transcript
    if role == "assistant" and part.type.startswith("output_"):
        made = _given(text, where, "text" if part.type == "output_text" else "transcript")
        return {"type": "text", "text": made}, {"type": "output_text", "text": made}
    if part.type == "input_text" and role != "assistant":
        made = _given(text, where, "text")
        return {"type": "text", "text": made}, {"type": "input_text", "text": made}
    if role != "user" or part.type.startswith("output_"):
        message = f"{where} is {part.type}, which a message of role {role} can't have."
        raise ApiError(400, message, "invalid_value", f"{where}.type")
    if part.type == "input_audio":
        sound = _given(part.audio, where, "audio")
        samples = decoded_sound(sound, codec, f"{where}.audio")
        resampler = Resampler(codec.rate, RATE)
        samples = resampler.push(samples, last=True)
        told = {"type": "input_audio", "transcript": part.transcript}
        return {"type": "audio", "audio": samples, "sampling_rate": RATE}, told
    url = _given(part.image_url, where, "image_url")
    read = media.read({"type": "image_url", "image_url": {"url": url}}, f"{where}.image_url")
    return read, {"type": "input_image", "image_url": url}


def _given(value: str | None, where: str, name: str) -> str:
    if value is None:
        message = f"{where} has no {name}."
        raise ApiError(400, message, "missing_field", f"{where}.{name}")
    return value


def _still_made(item_id: str) -> ApiError:
    message = f"item {item_id[:80]!r} is still being made. Send response.cancel first."
    return ApiError(400, message, "item_in_progress", "item_id")


def _in_base64(samples: Any, codec: Codec) -> str:
    sound = Resampler(RATE, codec.rate).push(np.asarray(samples, np.float32), last=True)
    return encoded_sound(sound, codec)
