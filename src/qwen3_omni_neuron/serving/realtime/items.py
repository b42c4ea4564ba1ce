"""Items of a conversation: its turns as clients see them, by id."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.prompt.turns import Reply, Turn
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.media import MediaReader, sound_bytes
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import ITEM
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    TURN_RATE,
    Codec,
    Resampler,
    decoded_sound,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.events import (
    Base64,
    CallItem,
    Connection,
    ContentPart,
    Item,
    ItemReference,
    Json,
    MessageItem,
    OutputItem,
)
from qwen3_omni_neuron.session import Session

ITEM_BYTES = 1024  # bytes counted per item beside its content
EMPTY_MESSAGE: Json = {"role": "user", "content": ""}
_MOST_LOGGED = 64  # warnings in a session's log line
# Fields of a content part by type, beside those without effect.
_PART_FIELDS = {
    **{"input_text": ("text",), "input_audio": ("audio", "transcript")},
    **{"input_image": ("image_url",), "output_text": ("text",), "output_audio": ("transcript",)},
}


def new_item(kind: str, item_id: str | None = None, **fields: Any) -> Json:
    """Return an item as clients see it."""
    item_id = item_id or new_id("item_")
    return {"id": item_id, "object": "realtime.item", "type": kind, "status": "completed", **fields}


def item_of(turn: Turn | Reply, codec: Codec | None = None) -> Json:
    """Return a turn as clients see it. codec: format of the user's sound; None: omit it."""
    item = dict(turn.shown)
    if isinstance(turn, Reply):
        begun = item["status"] == "in_progress"
        return item | {"content": [] if begun else [reply_part(turn.spoken, turn.text)]}
    # Sound that was only transcribed is not in its turn.
    media = turn.media if codec is not None else []
    sounds = [medium.clip.waveform for medium in media if medium.clip is not None]
    if "content" in item:
        item["content"] = parts = [dict(part) for part in item["content"]]
        for part in parts:
            if codec is not None and part["type"] == "input_audio" and sounds:
                sound = Resampler(TURN_RATE, codec.rate).push(sounds.pop(0), last=True)
                part["audio"] = Base64(encoded_sound(sound, codec))
    return item


def reply_part(spoken: bool, text: str) -> Json:
    """Return the only part of a reply's content."""
    if spoken:
        return {"type": "output_audio", "transcript": text}
    return {"type": "output_text", "text": text}


class ConversationItems:
    """Items of a session: its turns in order, with their clients' ids.

    A turn's `shown` is the item as clients see it, without a reply's content. account: the
    session's bytes. Coroutines answer clients' events; other methods are for the session's thread.
    """

    def __init__(self, connection: Connection, omni: Qwen3Omni, session: Session, account: Account):
        self.id = new_id("conv_")  # the conversation's
        self.session, self.account = session, account
        self._connection, self._omni = connection, omni

    async def create(self, item: Item, after: str | None, codec: Codec) -> None:
        """Insert a client's item at the end, after another one, or after "root"."""
        draft, warnings = await self.draft(item, codec)
        try:
            made, before = await self._connection.in_thread(self._insert, draft, after)
        except BaseException:
            self.account.release(draft.size)
            raise
        await self.announce(made, before, warnings)

    async def draft(self, item: Item, codec: Codec) -> tuple[Turn, list[str]]:
        """Read a client's item and media. Returns its turn and warnings about its files."""
        service, context = self._connection.service, self._connection.context
        service.count_without_effect(ITEM, item)
        media = MediaReader(service, self._omni, context.owner)
        draft = await self._connection.in_turn(self._read, item, media, codec)
        try:
            await media.finish(partial(_hold, draft, self.account))
        except BaseException:
            self.account.release(draft.size)
            raise
        context.warnings += media.warnings[: max(0, _MOST_LOGGED - len(context.warnings))]
        return draft, media.warnings

    async def announce(self, item: Json, before: str | None, warnings: Sequence[str] = ()) -> None:
        """Send the events of a complete item. before: id of the previous item."""
        fields: Json = {"item": item, "previous_item_id": before}
        if warnings:
            fields["warnings"] = list(warnings)
        await self._connection.send("conversation.item.added", **fields)
        await self._connection.send("conversation.item.done", **fields)

    async def retrieve(self, item_id: str, codec: Codec) -> None:
        """Send an item with the user's sound. Raises ApiError."""
        made = await self._connection.in_thread(
            lambda: item_of(self._found(item_id, "item_id", "retrieve"), codec)
        )
        await self._connection.send("conversation.item.retrieved", item=made)

    async def delete(self, item_id: str) -> None:
        """Remove an item. Raises ApiError."""
        await self._connection.in_thread(self._delete, item_id)
        await self._connection.send("conversation.item.deleted", item_id=item_id)

    async def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Truncate a reply to its heard part. Raises ApiError."""
        fields = {"item_id": item_id, "content_index": content_index, "audio_end_ms": audio_end_ms}
        await self._connection.in_thread(self._truncate, **fields)
        await self._connection.send("conversation.item.truncated", **fields)

    def previous(self, turn: Turn | Reply) -> str | None:
        """Return the id of the item before a turn."""
        turns = self.session.turns
        at = turns.index(turn)
        return turns[at - 1].id if at else None

    def input_of(self, given: Sequence[Turn | ItemReference]) -> list[Turn | Reply]:
        """Return the turns of a response's own input. Raises ApiError."""
        return [
            self._found(item.id, "response.input")
            if isinstance(item, ItemReference)
            else self.session.read(item.message)
            for item in given
        ]

    def begin_reply(self, reply: Reply, speed: float) -> str | None:
        """Create an item of a reply in the history. Returns the previous item's id."""
        reply.shown = new_item("message", role="assistant", status="in_progress")
        reply.id, reply.size, reply.speed = reply.shown["id"], ITEM_BYTES, speed
        self.account.add(reply.size)
        return self.previous(reply)

    def add_call(self, draft: Turn, after: Sequence[str | None]) -> str | None:
        """Insert a reply's call after the last of `after`; return the previous item's id."""
        ids = [turn.id for turn in self.session.turns]
        left = [ids.index(item_id) for item_id in after if item_id in ids]
        self.account.add(draft.size)
        return self._insert_at(draft, left[-1] + 1 if left else len(ids))[1]

    def settle(self, reply: Reply, text: str, as_it_is: bool) -> None:
        """End a reply's item, unless a client has deleted it.

        text: as sent to clients. as_it_is: False if the reply has other text, such as reasoning.
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

    def _read(self, item: Item, media: MediaReader, codec: Codec) -> Turn:
        if item.id is not None and any(turn.id == item.id for turn in self.session.turns):
            raise ApiError(
                400,
                f"an item {item.id[:80]!r} exists already. Use another id, or leave it out.",
                "item_create_duplicate_item_id",
                "item.id",
            )
        return read_item(item, self.account, media, codec)

    def _insert(self, draft: Turn, after: str | None) -> tuple[Json, str | None]:
        turns = self.session.turns
        if after is None:
            return self._insert_at(draft, len(turns))
        if after == "root":
            return self._insert_at(draft, 0)
        return self._insert_at(draft, turns.index(self._found(after, "previous_item_id")) + 1)

    def _insert_at(self, draft: Turn, at: int) -> tuple[Json, str | None]:
        """Insert an item at an index. Returns it, and the previous item's id."""
        turns = self.session.turns
        read = self.session.read(draft.message)
        turn = replace(read, id=draft.id, shown=draft.shown, size=draft.size)
        self.session.insert(turn, turns[at] if at < len(turns) else None)
        return item_of(turn), self.previous(turn)

    def _delete(self, item_id: str) -> None:
        turn = self._found(item_id, "item_id", "delete")
        if turn.shown["status"] == "in_progress":
            raise _in_progress(item_id)
        self.forget(turn)

    def _truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        reply = self._found(item_id, "item_id", "truncate")
        if not isinstance(reply, Reply) or not reply.spoken:
            message = f"item {item_id[:80]!r} is not a spoken reply: only these can be truncated."
            raise wrong_value(message, "item_id")
        if reply.shown["status"] == "in_progress" or not reply.ended:  # its calls still follow
            raise _in_progress(item_id)
        if content_index:
            message = f"a reply has one part, of index 0, got {content_index}."
            raise wrong_value(message, "content_index")
        # Clients count whole ms, and may round up.
        if audio_end_ms > reply.sent_s * 1000 + 1:
            raise wrong_value(
                f"audio_end_ms is {audio_end_ms}, but only {int(reply.sent_s * 1000)} ms of the "
                "item's sound were sent. Give the played duration.",
                "audio_end_ms",
            )
        heard_s = min(audio_end_ms / 1000, reply.sent_s) * reply.speed
        self.session.heard(min(heard_s, reply.audio_s), reply)  # stretching rounds to whole samples

    def _found(self, item_id: str, param: str, event: str | None = None) -> Turn | Reply:
        """Return an item. event: kind of the event about it. Raises ApiError."""
        for turn in self.session.turns:
            if turn.id == item_id:
                return turn
        message = f"the conversation has no item {item_id[:80]!r}."
        code = f"item_{event}_invalid_item_id" if event else "item_not_found"
        raise ApiError(400, message, code, param)


def _in_progress(item_id: str) -> ApiError:
    message = f"item {item_id[:80]!r} is in progress. Send response.cancel first."
    return ApiError(400, message, "item_in_progress", "item_id")


def read_item(item: Item, account: Account, media: MediaReader, codec: Codec) -> Turn:
    """Read a client's item into a draft, reserving its size. Raises ApiError."""
    draft = draft_of(item)
    account.hold(draft.size)
    try:
        if isinstance(item, MessageItem):
            _read_content(draft, item, account, media, codec)
    except BaseException:
        account.release(draft.size)
        raise
    return draft


def _hold(draft: Turn, account: Account, size: int) -> None:
    account.hold(size)
    draft.size += size


def draft_of(item: Item) -> Turn:
    """Return the draft of an item, without a message's content, reserving nothing."""
    texts: list[str | None]
    if isinstance(item, OutputItem):
        draft, texts = Turn("tool", item.output), [item.output]
        draft.shown = new_item(item.type, item.id, call_id=item.call_id, output=item.output)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        draft = Turn("assistant", "", calls=[{"type": "function", "function": function}])
        call_id = item.call_id or new_id("call_")
        draft.shown = new_item(item.type, item.id, call_id=call_id, **function)
        texts = [item.name, item.arguments]
    else:
        draft = Turn(item.role, [])
        draft.shown = new_item(item.type, item.id, role=item.role, content=[])
        texts = [t for part in item.content for t in (part.text, part.transcript, part.image_url)]
    size = sum(sys.getsizeof(text) for text in texts if text is not None)
    draft.id, draft.size = draft.shown["id"], ITEM_BYTES + size
    return draft


def _read_content(
    draft: Turn, item: MessageItem, account: Account, media: MediaReader, codec: Codec
) -> None:
    for index, part in enumerate(item.content):
        where = f"item.content[{index}]"
        own = _PART_FIELDS[part.type]
        for name in ("text", "audio", "transcript", "image_url"):
            if getattr(part, name) is not None and name not in own:
                raise wrong_value(
                    f"{where}.{name}: a part of type {part.type} has {' and '.join(own)} alone. "
                    "Send another part, or leave it out.",
                    f"{where}.{name}",
                )
        read, shown = _read_part(part, item.role, where, media, codec)
        if read["type"] == "audio":
            _hold(draft, account, sound_bytes(len(read["audio"])))
        draft.given.append(read)
        draft.shown["content"].append(shown)
    if item.role != "user":
        draft.given = "".join(part["text"] for part in draft.given)


def _read_part(
    part: ContentPart, role: str, where: str, media: MediaReader, codec: Codec
) -> tuple[Json, Json]:
    """Return a content part for the API, and as clients see it."""
    # Pipecat's client sends an assistant's text as input_text.
    if role == "assistant" and part.type in ("output_text", "output_audio", "input_text"):
        text = _required(part, "transcript" if part.type == "output_audio" else "text", where)
        return {"type": "text", "text": text}, {"type": "output_text", "text": text}
    if part.type == "input_text":
        text = _required(part, "text", where)
        return {"type": "text", "text": text}, {"type": "input_text", "text": text}
    if role != "user" or part.type.startswith("output_"):
        message = f"{where} is {part.type}, which a message of role {role} can't have."
        raise wrong_value(message, f"{where}.type")
    if part.type == "input_audio":
        samples = decoded_sound(_required(part, "audio", where), codec, f"{where}.audio")
        samples = Resampler(codec.rate, TURN_RATE).push(samples, last=True)
        shown = {"type": "input_audio", "transcript": part.transcript}
        return {"type": "audio", "audio": samples, "sampling_rate": TURN_RATE}, shown
    url = _required(part, "image_url", where)
    read = media.read({**(part.model_extra or {}), "type": "input_image", "image_url": url}, where)
    return read, {"type": "input_image", "image_url": url}


def _required(part: ContentPart, name: str, where: str) -> str:
    value: str | None = getattr(part, name)
    if value is None:
        raise ApiError(400, f"{where} has no {name}.", "missing_field", f"{where}.{name}")
    return value
