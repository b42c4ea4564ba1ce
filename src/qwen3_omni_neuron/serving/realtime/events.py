"""Events of OpenAI's Realtime API, and a session's connection."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, TypeAdapter, ValidationError
from starlette.types import Send

from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.openai.bodies import ClientObject, OneOf, read_json, refused_field
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import ITEM, names_in
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime import dashscope
from qwen3_omni_neuron.serving.service import Service

Json = dict[str, Any]
Result = TypeVar("Result")
EventId = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=128)]
_FURTHER = names_in(ITEM, "") - {"*"}  # additional fields of a client's items


class ContentPart(ClientObject):
    """Part of a message: text, sound or an image with its fields, by type."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None

    def may_have(self) -> Collection[str]:
        """Return the names of further fields; MediaReader checks image fields."""
        return ("*",) if self.type == "input_image" else names_in(ITEM, "content[]")


class MessageItem(ClientObject):
    """Message with a role."""

    further = names_in(ITEM, "")
    type: Literal["message"]
    id: Id | None = None
    role: Literal["system", "user", "assistant"]
    content: list[ContentPart]


class CallItem(ClientObject):
    """Call of a function."""

    further = _FURTHER
    type: Literal["function_call"]
    id: Id | None = None
    call_id: Id | None = None
    name: str
    arguments: str


class OutputItem(ClientObject):
    """Output of a function."""

    further = _FURTHER
    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: Id
    output: str


Item = Annotated[MessageItem | CallItem | OutputItem, OneOf()]


class ItemReference(ClientObject):
    """Reference to an item of the conversation, as input of one response."""

    type: Literal["item_reference"]
    id: Id


class _Event(ClientObject):
    event_id: EventId | None = None


class SessionUpdate(_Event):
    """Change the session. `session` is read by `session_config`."""

    type: Literal["session.update"]
    session: Json


class Append(_Event):
    """Next piece of the user's sound, in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class Signal(_Event):
    """Event without fields.

    session.finish: DashScope's clients ask for session.finished once no response is generated.
    output_audio_buffer.clear: the client has stopped playback.
    """

    type: Literal[
        "session.finish",
        "input_audio_buffer.commit",
        "input_audio_buffer.clear",
        "output_audio_buffer.clear",
    ]


class ItemCreate(_Event):
    """Add an item to the conversation."""

    type: Literal["conversation.item.create"]
    previous_item_id: Id | None = None
    item: Item


class ItemNamed(_Event):
    """Ask for an item with its sound, or remove it from the conversation."""

    type: Literal["conversation.item.retrieve", "conversation.item.delete"]
    item_id: Id


class ItemTruncate(_Event):
    """Report how much of a reply was heard."""

    type: Literal["conversation.item.truncate"]
    item_id: Id
    content_index: int = Field(ge=0)
    audio_end_ms: int = Field(ge=0)


class ResponseCreate(_Event):
    """Ask for a response. `response` is read by `session_config`."""

    type: Literal["response.create"]
    response: Json | None = None


class ResponseCancel(_Event):
    """Stop the response."""

    type: Literal["response.cancel"]
    response_id: Id | None = None


ClientEvent = (
    SessionUpdate
    | Signal
    | Append
    | ItemCreate
    | ItemNamed
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
_ITEMS: TypeAdapter[list[Item | ItemReference]] = TypeAdapter(
    list[Annotated[MessageItem | CallItem | OutputItem | ItemReference, OneOf()]]
)
_LARGE = 1 << 18  # characters in strings
_VALUE = 1 << 6  # characters that take as long as a value of a list or object
_EVENTS: Mapping[str, type[ClientEvent]] = {
    name: kind
    for kind in get_args(ClientEvent)
    for name in get_args(kind.model_fields["type"].annotation)
}


class ClientGoneError(Exception):
    """The connection was lost during a send."""


def parse_event(text: str) -> Json:
    """Parse a client's event. Raises ApiError."""
    given = read_json(text.encode("utf-8", "surrogatepass"), "event")
    if not isinstance(given, dict):
        message = f"the event is a {type(given).__name__}; send an object with a type."
        raise ApiError(400, message, "invalid_json")
    return given


def read_event(given: Json) -> ClientEvent:
    """Validate a client's event. Raises ApiError."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _EVENTS:
        known = ", ".join(sorted(_EVENTS))
        message = f"unknown client event {str(kind)[:80]!r}. Known: {known}."
        raise ApiError(400, message, "unknown_event", "type")
    try:
        return _EVENTS[kind].model_validate(given)
    except ValidationError as error:
        raise wrong_field(error) from error


def read_items(given: Any) -> list[Item | ItemReference]:
    """Read the input of one response. Raises ApiError."""
    try:
        return _ITEMS.validate_python(given)
    except ValidationError as error:
        raise wrong_field(error, before="response.input") from error


def wrong_field(error: ValidationError, before: str = "") -> ApiError:
    """Return the first wrong field's error. before: see `first_wrong`."""
    return refused_field(error, before, "the event", "docs/realtime.md")


@dataclass(frozen=True)
class Base64:
    """Base64 of an event, copied into its JSON.

    json.dumps would search it for escapes: 25 ms for ten minutes of sound.
    """

    text: str


def is_large(fields: Json) -> bool:
    """Return whether an event's JSON may take more than 1 or 2 ms to write."""
    left, found = _LARGE, list[Any](fields.values())
    while found and left >= 0:
        value = found.pop()
        value = value.text if isinstance(value, Base64) else value
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, dict | list):
            left -= _VALUE * len(value)
            found += value
            found += value.values() if isinstance(value, dict) else ()
    return left < 0


def server_event(kind: str, **fields: Any) -> str:
    """Return a server event as ASCII JSON: a client's text may have lone surrogates."""
    event = {"type": kind, "event_id": new_id("event_"), **fields}
    texts: list[str] = []
    placeholder = f"base64_{event['event_id']}"  # unknown to clients

    def take(value: Base64) -> str:
        texts.append(value.text)
        return placeholder

    dumped = json.dumps(event, separators=(",", ":"), default=take, allow_nan=False)
    first, *others = dumped.split(placeholder)
    return "".join((first, *chain.from_iterable(zip(texts, others, strict=True))))


@dataclass(frozen=True)
class Connection:
    """Connection of one session, shared by its parts.

    raw_send: sends an ASGI message. pool: the session's thread. is_dashscope: the client uses
    DashScope's events. It must not refer to the session: a cycle would keep its sound in memory.
    """

    raw_send: Send
    pool: ThreadPoolExecutor
    service: Service
    context: Context
    is_dashscope: bool

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event. Raises ClientGoneError."""
        if self.is_dashscope:
            told = dashscope.told(kind, fields)
            if told is None:
                return
            kind, fields = told
        write = partial(server_event, kind, **fields)
        text = await self.in_thread(write) if is_large(fields) else write()
        try:
            await self.raw_send({"type": "websocket.send", "text": text})
        except OSError as error:  # ASGI's error for a lost connection
            raise ClientGoneError from error

    async def send_error(self, error: ApiError, event_id: str | None = None) -> None:
        """Send an error event. event_id: the client event that caused it."""
        await self.send("error", error={**error.body["error"], "event_id": event_id})

    async def in_thread(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a function in the session's thread."""
        return await asyncio.wrap_future(self.pool.submit(partial(call, *given, **named)))

    async def in_turn(self, call: Callable[..., Any], *given: Any) -> Any:
        """Call a function in the session's thread, in the owner's turn among the readers."""
        return await self.in_thread(self.in_own_turn, call, *given)

    def in_own_turn(self, call: Callable[..., Result], *given: Any) -> Result:
        """Call a function in this thread, in the owner's turn among the readers."""
        with self.service.readers.turn(self.context.owner):
            return call(*given)

    def failed(self, error: Exception) -> ApiError:
        """Return the client's error for an exception; see `Service.failed`."""
        return self.service.failed(error, self.context)
