"""Items of a conversation as clients see them: the turns of its session, by their ids."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.turns import Reply, Turn
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import ITEM
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    TURN_RATE,
    Codec,
    Resampler,
    Samples,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.realtime.drafts import ITEM_BYTES, hold, new_item, read_item
from qwen3_omni_neuron.serving.realtime.events import Base64, Item, ItemReference, Json
from qwen3_omni_neuron.session import Session

_MOST_LOGGED = 64  # warnings in a session's log line
EMPTY_MESSAGE: Json = {"role": "user", "content": ""}


def item_of(turn: Turn | Reply) -> Json:
    """Return a turn as clients see it, without sound."""
    item = dict(turn.shown)
    if isinstance(turn, Reply):
        begun = item["status"] == "in_progress"
        item["content"] = [] if begun else [reply_part(turn.spoken, turn.text)]
    elif "content" in item:
        item["content"] = [
            part | {"image_url": part["image_url"].tobytes().decode()}
            if "image_url" in part
            else part
            for part in item["content"]
        ]
    return item


def reply_part(spoken: bool, text: str) -> Json:
    """Return the one part of a reply's content."""
    if spoken:
        return {"type": "output_audio", "transcript": text}
    return {"type": "output_text", "text": text}


def _item_with_sound(turn: Turn | Reply, codec: Codec) -> Json:
    """Return a turn as clients see it, with the user's sound."""
    item = item_of(turn)
    media = [] if isinstance(turn, Reply) else turn.media
    # Sound that was only transcribed is not in its turn.
    if sounds := [medium.clip.waveform for medium in media if medium.clip is not None]:
        item["content"] = [
            part | {"audio": _in_base64(sounds.pop(0), codec)}
            if part["type"] == "input_audio"
            else part
            for part in item["content"]
        ]
    return item


class ConversationItems:
    """Items of a session: its turns in their order, each with the id that its client knows.

    `shown` of a turn is the item as clients see it, but for a reply's content, which is its text,
    and for images, whose URLs are uint8 [bytes].
    session: the turns. account: bytes that the session holds.
    Coroutines answer clients' events; all other methods are for the session's thread.
    """

    def __init__(self, connection: Connection, omni: Qwen3Omni, session: Session, account: Account):
        self.id = new_id("conv_")  # the conversation's
        self.session, self.account = session, account
        self._connection, self._omni = connection, omni

    # Clients' events.

    async def create(self, item: Item, after: str | None, codec: Codec) -> None:
        """Insert a client's item: at the end, after another one, or after "root".

        Raises ApiError and the errors of the API.
        """
        draft, warnings = await self.draft(item, codec)
        try:
            made, before = await self._connection.in_thread(self._insert, draft, after)
        except BaseException:
            self.account.release(draft.size)
            raise
        await self.announce(made, before, warnings)

    async def draft(self, item: Item, codec: Codec) -> tuple[Turn, list[str]]:
        """Read a client's item with its media; see `read_item`. Raises the API's errors, too.

        Returns the warnings about its files, too, which are also in the session's log line.
        """
        service, owner = self._connection.service, self._connection.context.owner
        service.count_without_effect(ITEM, item)
        media = MediaReader(service, self._omni, owner)
        draft = await self._connection.in_thread(self._read, item, media, codec)
        try:
            await media.finish(partial(hold, draft, self.account))
        except BaseException:
            self.account.release(draft.size)
            raise
        logged = self._connection.context.warnings
        logged += media.warnings[: max(0, _MOST_LOGGED - len(logged))]
        return draft, media.warnings

    async def announce(self, item: Json, before: str | None, warnings: Sequence[str] = ()) -> None:
        """Send the events of a complete item. before: id of the previous item.

        warnings: about its files; a field of the events where there are any.
        """
        for kind in ("added", "done"):
            fields: Json = {"item": item, "previous_item_id": before}
            if warnings:
                fields["warnings"] = list(warnings)
            await self._connection.send(f"conversation.item.{kind}", **fields)

    async def retrieve(self, item_id: str, codec: Codec) -> None:
        """Send an item with the user's sound. Raises ApiError."""
        made = await self._connection.in_thread(
            lambda: _item_with_sound(self._found(item_id, "item_id", "retrieve"), codec)
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

    def add(self, turn: Turn | Reply) -> str | None:
        """Note that a turn is in the history. Returns the previous item's id."""
        turns = self.session.turns
        at = turns.index(turn)
        return turns[at - 1].id if at else None

    def input_of(self, given: Sequence[Turn | ItemReference]) -> list[Turn | Reply]:
        """Return the turns of a response's own input: drafts and references. Raises ApiError."""
        return [
            self._found(item.id, "response.input")
            if isinstance(item, ItemReference)
            else self.session.read(item.message)
            for item in given
        ]

    def answerable(self, turns: Sequence[Turn | Reply]) -> list[Turn | Reply]:
        """Return turns that end with a user's or tool's turn: append an empty one if needed."""
        if turns and turns[-1].role in ("user", "tool"):
            return list(turns)
        return [*turns, self.session.read(EMPTY_MESSAGE)]

    def begin_reply(self, reply: Reply, speed: float) -> str | None:
        """Make an item of a reply in the history. Returns the previous item's id.

        Clients are told of the item once it has content. speed: see `Reply`.
        """
        reply.shown = new_item("message", role="assistant", status="in_progress")
        reply.id, reply.size, reply.speed = reply.shown["id"], ITEM_BYTES, speed
        self.account.add(reply.size)
        return self.add(reply)

    def add_call(self, draft: Turn, after: Sequence[str | None]) -> str | None:
        """Insert a reply's call after the last of the items with the given ids.

        Items that a client has deleted are ignored; if none is left, the call is the last item.
        Returns the previous item's id.
        """
        turns = self.session.turns
        ids = [turn.id for turn in turns]
        left = [ids.index(item_id) for item_id in after if item_id in ids]
        self.account.add(draft.size)
        return self._insert_at(draft, left[-1] + 1 if left else len(turns))[1]

    def settle(self, reply: Reply, text: str, as_it_is: bool) -> None:
        """End a reply's item. text: text that clients got. as_it_is: the reply has no other text.

        Otherwise reasoning, and calls with items of their own, are removed from the reply's text.
        Does nothing if a client has deleted the item.
        """
        if reply not in self.session.turns:
            return
        size = sys.getsizeof(text)
        reply.size += size
        self.account.add(size)
        if not as_it_is:
            reply.rewrite(text)

    def forget(self, turn: Turn | Reply) -> None:
        """Remove an item without telling clients."""
        self.session.remove(turn)
        self.account.release(turn.size)

    def transcribed(self, turn: Turn, text: str) -> None:
        """Set the transcript of a user's spoken turn."""
        turn.shown["content"][0]["transcript"] = text

    def _read(self, item: Item, media: MediaReader, codec: Codec) -> Turn:
        if item.id is not None and any(turn.id == item.id for turn in self.session.turns):
            raise ApiError(
                400,
                f"there is an item {item.id[:80]!r} already. Take another id, or leave it out.",
                "item_create_duplicate_item_id",
                "item.id",
            )
        return read_item(item, self.account, media, codec)

    def _insert(self, draft: Turn, after: str | None) -> tuple[Json, str | None]:
        """Insert an item as `create` does. Returns it, and the previous item's id."""
        turns = self.session.turns
        if after is None:
            return self._insert_at(draft, len(turns))
        if after == "root":
            return self._insert_at(draft, 0)
        return self._insert_at(draft, turns.index(self._found(after, "previous_item_id")) + 1)

    def _insert_at(self, draft: Turn, at: int) -> tuple[Json, str | None]:
        """Insert an item before the turn with an index, or at the end."""
        turns = self.session.turns
        read = self.session.read(draft.message)
        turn = replace(read, id=draft.id, shown=draft.shown, size=draft.size)
        self.session.insert(turn, turns[at] if at < len(turns) else None)
        return item_of(turn), self.add(turn)

    def _delete(self, item_id: str) -> None:
        turn = self._found(item_id, "item_id", "delete")
        if turn.shown["status"] == "in_progress":
            raise _in_progress(item_id)
        self.forget(turn)

    def _truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        reply = self._found(item_id, "item_id", "truncate")
        if not isinstance(reply, Reply) or not reply.spoken:
            message = f"item {item_id[:80]!r} is not a reply in speech: only such can be truncated."
            raise wrong_value(message, "item_id")
        if reply.shown["status"] == "in_progress" or not reply.ended:  # its calls still follow
            raise _in_progress(item_id)
        if content_index:
            message = f"a reply has one part, of index 0, got {content_index}."
            raise wrong_value(message, "content_index")
        # Clients count whole ms, and may round up.
        if audio_end_ms > reply.sent_s * 1000 + 1:
            raise wrong_value(
                f"audio_end_ms is {audio_end_ms}, and {int(reply.sent_s * 1000)} ms of the "
                "item's sound were sent. Give what was played of it.",
                "audio_end_ms",
            )
        heard_s = min(audio_end_ms / 1000, reply.sent_s) * reply.speed
        self.session.heard(min(heard_s, reply.audio_s), reply)  # stretching rounds to whole samples

    def _found(self, item_id: str, param: str, event: str | None = None) -> Turn | Reply:
        """Return an item. event: kind of the event that is about it. Raises ApiError."""
        for turn in self.session.turns:
            if turn.id == item_id:
                return turn
        message = f"there is no item {item_id[:80]!r} in the conversation."
        code = f"item_{event}_invalid_item_id" if event else "item_not_found"
        raise ApiError(400, message, code, param)


def _in_progress(item_id: str) -> ApiError:
    message = f"item {item_id[:80]!r} is still being made. Send response.cancel first."
    return ApiError(400, message, "item_in_progress", "item_id")


def _in_base64(samples: Samples, codec: Codec) -> Base64:
    sound = Resampler(TURN_RATE, codec.rate).push(samples, last=True)
    return Base64(encoded_sound(sound, codec))
