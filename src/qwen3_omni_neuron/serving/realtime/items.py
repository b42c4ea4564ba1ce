"""Items of a conversation as clients see them, each with the session's turn that it shows."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.turns import Reply, Turn
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.ids import new_id
from qwen3_omni_neuron.serving.openai.reply_text import Call
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    TURN_RATE,
    Codec,
    Resampler,
    Samples,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.realtime.drafts import (
    ITEM_BYTES,
    Draft,
    draft_of,
    read_item,
    text_bytes,
)
from qwen3_omni_neuron.serving.realtime.events import Base64, CallItem, Item, ItemReference, Json
from qwen3_omni_neuron.session import Session

EMPTY_MESSAGE: Json = {"role": "user", "content": ""}


@dataclass(eq=False)
class ConversationItem:
    """Item of the conversation.

    shown: the item as clients see it, without content if it is a reply. spoken: a reply's content
    is sound. audio_s: seconds of sound that the client was sent, at `speed` times the reply's own.
    size: bytes that it counts for.
    """

    id: str
    shown: Json
    turn: Turn | Reply
    size: int = ITEM_BYTES
    spoken: bool = False
    audio_s: float = 0.0
    speed: float = 1.0
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
    def sounds(self) -> list[Samples]:
        """Clips of a user's turn, at TURN_RATE."""
        if isinstance(self.turn, Reply) or isinstance(self.turn.given, str):
            return []
        content = self.turn.message["content"]
        return [part["audio"] for part in content if part["type"] == "audio"]

    @property
    def json(self) -> Json:
        """The item as clients see it, without sound."""
        made = {"id": self.id, "object": "realtime.item", **self.shown, "status": self.status}
        if self.is_reply:
            made["content"] = [] if self.status == "in_progress" else [self._content()]
        return made

    def json_with_sound(self, codec: Codec) -> Json:
        """Return the item as clients see it, with the user's sound."""
        made, sounds = self.json, self.sounds
        if sounds:
            made["content"] = [
                {**part, "audio": _in_base64(sounds.pop(0), codec)}
                if part["type"] == "input_audio"
                else part
                for part in made["content"]
            ]
        return made

    @property
    def stored(self) -> Json:
        """The item without its turn, as `of` takes it."""
        content = self.shown.get("content", ())
        pictures = [_bytes(part["image_url"]) if "image_url" in part else None for part in content]
        parts = [part | {"image_url": None} if "image_url" in part else part for part in content]
        return {
            "id": self.id,
            "shown": self.shown | ({"content": parts} if content else {}),
            "pictures": pictures,
            "size": self.size,
            "spoken": self.spoken,
            "audio_s": self.audio_s,
            "speed": self.speed,
            "status": "incomplete" if self.status == "in_progress" else self.status,
        }

    @staticmethod
    def of(stored: Json, turn: Turn | Reply) -> "ConversationItem":
        """Return the item that `stored` has described, with its turn."""
        fields = {name: value for name, value in stored.items() if name != "pictures"}
        content = stored["shown"].get("content", ())
        for part, picture in zip(content, stored["pictures"], strict=True):
            if picture is not None:
                part["image_url"] = picture.tobytes().decode(errors="surrogatepass")
        return ConversationItem(turn=turn, **fields)

    def _content(self) -> Json:
        if self.spoken:
            return {"type": "output_audio", "transcript": self.text}
        return {"type": "output_text", "text": self.text}


class ConversationItems:
    """Items of a session, by their ids. The session's turns have the same ids, and the order.

    session: its turns. account: bytes that the session holds. changes: number of changes so far.
    Coroutines answer clients' events; all other methods are for the session's thread.
    """

    def __init__(self, connection: Connection, omni: Qwen3Omni, session: Session, account: Account):
        self.id = new_id("conv_")  # the conversation's
        self.session, self.account = session, account
        self._connection, self._omni = connection, omni
        self._items: dict[str, ConversationItem] = {}
        self.changes = 0

    # Clients' events.

    async def create(self, item: Item, after: str | None, codec: Codec) -> None:
        """Insert a client's item: at the end, after another one, or after "root".

        Raises ApiError and the errors of the API.
        """
        draft = await self.draft(item, codec)
        try:
            made, before = await self._connection.in_thread(self._insert, draft, after)
        except BaseException:
            draft.drop()
            raise
        await self.announce(made, before)

    async def draft(self, item: Item, codec: Codec) -> Draft:
        """Read a client's item with its media. Raises ApiError and the API's errors."""
        service, owner = self._connection.service, self._connection.context.owner
        media = MediaReader(service, self._omni, owner)
        draft = await self._connection.in_thread(self._read, item, media, codec)
        try:
            await media.finish(draft.hold)
        except BaseException:
            draft.drop()
            raise
        return draft

    async def announce(self, item: ConversationItem, before: str | None) -> None:
        """Send the events of a complete item. before: id of the previous item."""
        for kind in ("added", "done"):
            fields = {"item": item.json, "previous_item_id": before}
            await self._connection.send(f"conversation.item.{kind}", **fields)

    async def retrieve(self, item_id: str, codec: Codec) -> None:
        """Send an item with the user's sound. Raises ApiError."""
        made = await self._connection.in_thread(
            lambda: self._found(item_id, "item_id", "retrieve").json_with_sound(codec)
        )
        await self._connection.send("conversation.item.retrieved", item=made)

    async def delete(self, item_id: str) -> None:
        """Remove an item. Raises ApiError."""
        await self._connection.in_thread(self._delete, item_id)
        await self._connection.send("conversation.item.deleted", item_id=item_id)

    async def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Truncate a reply to the part that was heard. Raises ApiError."""
        fields = {"item_id": item_id, "content_index": content_index, "audio_end_ms": audio_end_ms}
        await self._connection.in_thread(self._truncate, **fields)
        await self._connection.send("conversation.item.truncated", **fields)

    # The session's thread.

    def add(self, item: ConversationItem) -> str | None:
        """Add an item whose turn is in the history. Returns the previous item's id."""
        self.changes += 1
        self._items[item.id] = item
        item.turn.id = item.id
        turns = self.session.turns
        at = turns.index(item.turn)
        return turns[at - 1].id if at else None

    def input_of(self, given: Sequence[Draft | ItemReference]) -> list[Turn | Reply]:
        """Return the turns of a response's own input. Raises ApiError."""
        return [
            self._found(item.id, "response.input").turn
            if isinstance(item, ItemReference)
            else self.session.read(item.message)
            for item in given
        ]

    def answerable(self, turns: Sequence[Turn | Reply]) -> list[Turn | Reply]:
        """Return turns that end with a user's or tool's turn: append an empty one if needed."""
        if turns and turns[-1].role in ("user", "tool"):
            return list(turns)
        return [*turns, self.session.read(EMPTY_MESSAGE)]

    def begin_reply(
        self, reply: Reply, spoken: bool, speed: float
    ) -> tuple[ConversationItem, str | None]:
        """Make the item of a reply in the history. Returns it, and the previous item's id.

        Clients are told of the item once it has content.
        """
        shown = {"type": "message", "role": "assistant"}
        item = ConversationItem(new_id("item_"), shown, reply, spoken=spoken, speed=speed)
        item.status = "in_progress"
        self.account.add(item.size)
        return item, self.add(item)

    def add_call(self, call: Call, after: Sequence[str]) -> tuple[ConversationItem, str | None]:
        """Insert a reply's call after the last of the items with the given ids.

        Items that a client has deleted are ignored; if none is left, the call is the last item.
        Returns the call's item, and the previous item's id.
        """
        turns = self.session.turns
        left = [self._items[item_id].turn for item_id in after if item_id in self._items]
        at = turns.index(left[-1]) + 1 if left else len(turns)
        given = CallItem(
            type="function_call", call_id=call.id, name=call.name, arguments=call.arguments
        )
        draft = draft_of(given, self.account)
        draft.size = ITEM_BYTES + text_bytes(given)
        self.account.add(draft.size)
        return self._insert_at(draft, at)

    def settle(self, item: ConversationItem, text: str, as_it_is: bool) -> None:
        """End a reply's item. text: text that clients got. as_it_is: the reply has no other text.

        Otherwise reasoning, and calls with items of their own, are removed from the reply's text.
        Does nothing if a client has deleted the item.
        """
        if self._items.get(item.id) is not item:
            return
        self.changes += 1
        size = sys.getsizeof(text)
        item.size += size
        self.account.add(size)
        if not as_it_is:
            # A client may have reported heard seconds since the reply's last event.
            heard_s = item.turn.heard_s if isinstance(item.turn, Reply) else None
            self._replace_text(item, text, None if heard_s is None else heard_s / item.speed)

    def forget(self, item: ConversationItem) -> None:
        """Remove an item without telling clients."""
        self.changes += 1
        self.session.remove(item.turn)
        self.account.release(item.size)
        del self._items[item.id]

    def transcribed(self, item: ConversationItem, text: str) -> None:
        """Set the transcript of a user's spoken turn."""
        self.changes += 1
        item.shown["content"][0]["transcript"] = text

    def stored(self) -> Json:
        """Return the conversation for `prompt.stored.pack`.

        Pictures as clients see them are arrays: they can be longer than all text that is stored.
        Raises MessageError while a reply streams, or the user's turn has begun.
        """
        document = self.session.document()
        items = [self._items[turn.id].stored for turn in self.session.turns if turn.id is not None]
        return {"id": self.id, "session": document, "items": items}

    def restore(self, stored: Json) -> None:
        """Go on with the conversation that `stored` has described; there must be no items yet.

        Raises ApiError if the session would hold too much, and StoredSessionError.
        """
        size = sum(item["size"] for item in stored["items"])
        self.account.hold(size)
        try:
            self.session.restore(stored["session"])
        except BaseException:
            self.account.release(size)
            raise
        self.id, self.changes = stored["id"], self.changes + 1
        for item, turn in zip(stored["items"], self.session.turns, strict=True):
            self._items[item["id"]] = ConversationItem.of(item, turn)

    def _read(self, item: Item, media: MediaReader, codec: Codec) -> Draft:
        if item.id is not None and item.id in self._items:
            raise ApiError(
                400,
                f"there is an item {item.id[:80]!r} already. Take another id, or leave it out.",
                "item_create_duplicate_item_id",
                "item.id",
            )
        return read_item(item, self.account, media, codec)

    def _insert(self, draft: Draft, after: str | None) -> tuple[ConversationItem, str | None]:
        """Insert an item as `create` does. Returns it, and the previous item's id."""
        turns = self.session.turns
        if after is None:
            return self._insert_at(draft, len(turns))
        if after == "root":
            return self._insert_at(draft, 0)
        return self._insert_at(draft, turns.index(self._found(after, "previous_item_id").turn) + 1)

    def _insert_at(self, draft: Draft, at: int) -> tuple[ConversationItem, str | None]:
        """Insert an item before the turn with an index, or at the end."""
        turns = self.session.turns
        turn = self.session.read(draft.message)
        item = ConversationItem(draft.id, draft.shown, turn, draft.size)
        self.session.insert(turn, turns[at] if at < len(turns) else None)
        return item, self.add(item)

    def _delete(self, item_id: str) -> None:
        item = self._found(item_id, "item_id", "delete")
        if item.status == "in_progress":
            raise _in_progress(item_id)
        self.forget(item)

    def _truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        item = self._found(item_id, "item_id", "truncate")
        if not (item.is_reply and item.spoken):
            message = f"item {item_id[:80]!r} is not a reply in speech: only such can be truncated."
            raise ApiError(400, message, "invalid_value", "item_id")
        streams = isinstance(item.turn, Reply) and not item.turn.ended  # its calls still follow
        if item.status == "in_progress" or streams:
            raise _in_progress(item_id)
        if content_index:
            message = f"a reply has one part, of index 0, got {content_index}."
            raise ApiError(400, message, "invalid_value", "content_index")
        # Clients count whole ms, and may round up.
        if audio_end_ms > item.audio_s * 1000 + 1:
            raise ApiError(
                400,
                f"audio_end_ms is {audio_end_ms}, and {int(item.audio_s * 1000)} ms of the "
                "item's sound were sent. Give what was played of it.",
                "invalid_value",
                "audio_end_ms",
            )
        heard_s = min(audio_end_ms / 1000, item.audio_s)
        self.changes += 1
        if isinstance(item.turn, Reply):
            # Time stretching rounds to whole samples.
            self.session.heard(min(heard_s * item.speed, item.turn.audio_s), item.turn)
        else:
            self._replace_text(item, item.text, heard_s)

    def _replace_text(self, item: ConversationItem, text: str, heard_s: float | None) -> None:
        """Replace a reply by this text, cut to the fraction that was heard; None: all of it."""
        share = 1.0 if heard_s is None or not item.audio_s else heard_s / item.audio_s
        heard = text[: round(share * len(text))]
        turn = self.session.read({"role": "assistant", "content": heard})
        turn.id = item.id
        self.session.insert(turn, item.turn)
        self.session.remove(item.turn)
        item.turn = turn

    def _found(self, item_id: str, param: str, event: str | None = None) -> ConversationItem:
        """Return an item. event: kind of the event that is about it. Raises ApiError."""
        item = self._items.get(item_id)
        if item is None:
            message = f"there is no item {item_id[:80]!r} in the conversation."
            code = f"item_{event}_invalid_item_id" if event else "item_not_found"
            raise ApiError(400, message, code, param)
        return item


def _in_progress(item_id: str) -> ApiError:
    message = f"item {item_id[:80]!r} is still being made. Send response.cancel first."
    return ApiError(400, message, "item_in_progress", "item_id")


def _bytes(url: str) -> Any:
    """Return a URL as uint8 [bytes]."""
    return np.frombuffer(url.encode(errors="surrogatepass"), np.uint8)


def _in_base64(samples: Any, codec: Codec) -> Base64:
    sound = Resampler(TURN_RATE, codec.rate).push(np.asarray(samples, np.float32), last=True)
    return Base64(encoded_sound(sound, codec))
