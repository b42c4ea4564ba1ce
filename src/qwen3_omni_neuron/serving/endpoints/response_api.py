"""POST /v1/responses: a conversation in OpenAI's other format."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, dropwhile, islice
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, TypeAdapter, ValidationError

from qwen3_omni_neuron.events import Event
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import BODY_COPIES, Context
from qwen3_omni_neuron.serving.edge.response_socket import LAST_RESPONSE
from qwen3_omni_neuron.serving.endpoints.answer import Question, Reply, answer, parts_of
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.kept import KeptResponse, LastResponse
from qwen3_omni_neuron.serving.openai import bodies
from qwen3_omni_neuron.serving.openai import responses as requests
from qwen3_omni_neuron.serving.openai.chat_request import ObjectFormat
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import INPUT_ITEMS, RESPONSE, RESPONSES
from qwen3_omni_neuron.serving.openai.openapi import errors_of, takes_json, takes_query
from qwen3_omni_neuron.serving.openai.reply import PUBLIC_ID_BYTES, new_id, response_usage
from qwen3_omni_neuron.serving.openai.responses import (
    OutputItems,
    listed,
    newly_listed,
    sent_back,
    with_ids,
)
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()
Json = dict[str, Any]
Query = TypeVar("Query", bound=BaseModel)
SESSION_KEY = "session_key"
"""Name in a request's scope of the key that routed it to this replica; see `serving.fleet`."""
KeepResponse = Callable[[bytes, dict[str, bytes]], None]
"""Function that stores a response: its JSON, and its output's items by id."""
_BEGINNING = ("response.created", "response.in_progress")
_ITEMS: TypeAdapter[list[requests.InputItem]] = TypeAdapter(requests.InputItems)


@router.post(RESPONSES, **takes_json(requests.ResponseRequest))
async def create_response(request: Request) -> Response:
    """Answer a conversation in text."""
    service, context = parts_of(request)
    context.param = "input"
    response_id = new_id("resp_", PUBLIC_ID_BYTES) + request.scope.get(SESSION_KEY, "")
    asked = None
    if len(context.body) <= bodies.SMALL_BODY_BYTES:
        asked = bodies.parse_json(requests.ResponseRequest, context.body)
    last: LastResponse | None = request.scope.get(LAST_RESPONSE)
    read = partial(_read, asked, response_id, service, context, last)
    return await answer(service, context, read, asked is None or asked.names_earlier)


@router.get(RESPONSE, **takes_query(requests.ResponseQuery))
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    service, context = parts_of(request)
    if _query(request, requests.ResponseQuery, RESPONSE).stream:
        raise wrong_value("a finished response can't be streamed again.", "stream")
    kept = service.responses.get(context.owner, response_id)
    if kept is None:
        raise _not_kept(404, response_id, None)
    return Response(kept.body, media_type="application/json")


@router.get(INPUT_ITEMS, **takes_query(requests.ItemsQuery))
async def list_input_items(request: Request, response_id: str) -> Response:
    """Return the items that a response answered: earlier turns and its input."""
    service, context = parts_of(request)
    query = _query(request, requests.ItemsQuery, INPUT_ITEMS)
    turns = service.responses.conversation(context.owner, response_id)
    if turns is None:
        raise _not_kept(404, response_id, None)
    body = await service.readers.run(context.owner, _page, turns, query, service, context)
    return Response(body, media_type="application/json")


@router.delete(RESPONSE, responses=errors_of(404))
async def delete_response(request: Request, response_id: str) -> Json:
    """Delete a response; later turns can't continue it."""
    service, context = parts_of(request)
    if not service.responses.delete(context.owner, response_id):
        raise _not_kept(404, response_id, None)
    return {"id": response_id, "object": "response", "deleted": True}


def _query(request: Request, kind: type[Query], path: str) -> Query:
    """Return a request's query, and count its fields without effect. Raises ApiError."""
    try:
        query = kind.model_validate(requests.fields_of_query(request.query_params.multi_items()))
    except ValidationError as error:
        raise bodies.refused_field(error) from error
    service: Service = request.app.state.service
    service.count_without_effect(path, query)
    return query


def _not_kept(status: int, response_id: str, param: str | None) -> ApiError:
    return ApiError(
        status,
        f"the response {response_id[:80]!r}, or one that it continues, is not stored: it expired, "
        "was deleted, was too large, had store: false, or never existed. Send the whole "
        "conversation as input.",
        "previous_response_not_found" if param else "response_not_found",
        param,
    )


def _read(
    parsed: requests.ResponseRequest | None,
    response_id: str,
    service: Service,
    context: Context,
    last: LastResponse | None,
) -> "Question | Prepared":
    """Return a request's question. Raises ApiError.

    parsed: the body, if already parsed. last: of the socket, to which the answer is streamed.
    """
    asked = parsed or bodies.parse_json(requests.ResponseRequest, context.body)
    if last is not None:
        asked.stream = True
    bodies.check_model(service, asked.model)
    requests.check_response_request(asked)
    turns = list[KeptResponse]()
    if asked.previous_response_id is not None:
        turns = last.conversation(asked.previous_response_id) if last is not None else []
        found = service.responses.conversation
        turns = turns or found(context.owner, asked.previous_response_id) or []
        if not turns:
            raise _not_kept(400, asked.previous_response_id, "previous_response_id")
    kept_items = [item for t in turns for item in (*t.input.values(), *t.output.values())]
    earlier = _parsed(kept_items, service, context)
    own = _own_items(asked, service, context)
    items = [(f"previous_response_id: item {i}", item) for i, item in enumerate(earlier)]
    places = ["input"] if isinstance(asked.input, str) else [f"input[{i}]" for i in range(len(own))]
    items += zip(places, own, strict=True)
    wanted = names = None
    if asked.generate is not False:
        wanted, names = requests.chat_request_of(asked, items, context.omni.info.context_length)
    service.count_without_effect(RESPONSES, asked)
    kept, stores = None, asked.store is not False
    if (stores or last is not None) and len(context.body) <= service.responses.largest:
        said: list[requests.InputItem] = [
            item for item in own if not isinstance(item, requests.EarlierReasoning)
        ]
        given = with_ids(_ITEMS.dump_python(said, exclude_none=True))
        context.account.hold(sum(map(len, given.values())))
        listed_before = {n: c for t in turns for n, c in (*t.listed.items(), *t.output.items())}
        new = newly_listed(listed_before, given)
        kept = KeptResponse(b"", asked.previous_response_id, given, {}, new)
    asked.input = []  # frees the media: the chat request has them

    def keep(body: bytes, output: dict[str, bytes]) -> None:
        if kept is None:
            return
        made = replace(kept, body=body, output=output)
        if stores:
            service.responses.keep(context.owner, response_id, made)
        if last is not None:
            last.keep(response_id, [*turns, made])

    stored = stores and kept is not None
    if wanted is None:
        return Prepared(asked, response_id, keep, stored, service, context)
    reply = partial(ResponseReply, asked, response_id, keep, stored)
    return Question(wanted, reply, service, context, names)


def _page(
    turns: Sequence[KeptResponse], query: requests.ItemsQuery, service: Service, context: Context
) -> bytes:
    """Return a page of a conversation's items, except the last output. Raises ApiError."""
    parts = [part for turn in turns for part in (turn.listed, turn.output)][:-1]
    order: Any = iter if query.order == "asc" else reversed
    left = iter(order(parts))
    if query.after is not None:
        left = dropwhile(lambda part: query.after not in part, left)
    items = chain.from_iterable(order(part.items()) for part in left)
    if query.after is not None and query.after not in (name for name, _ in items):
        raise wrong_value(f"after: the conversation has no item {query.after[:80]!r}.", "after")
    page = list(islice(items, query.limit))
    _hold(sum(len(content) for _, content in page), service, context)
    data = [listed(name, content) for name, content in page]
    made = {"object": "list", "data": data, "has_more": next(items, None) is not None}
    ends = {"first_id": page[0][0], "last_id": page[-1][0]} if page else {}
    return to_json({**made, "first_id": None, "last_id": None, **ends})


def _parsed(
    contents: Sequence[bytes], service: Service, context: Context
) -> list[requests.InputItem]:
    _hold(sum(map(len, contents)), service, context)
    try:
        given = bodies.read_json(b"[" + b",".join(contents) + b"]", "conversation")
        return _ITEMS.validate_python(given)
    except ValidationError as error:  # too many items
        raise bodies.refused_field(error) from error


def _own_items(
    asked: requests.ResponseRequest, service: Service, context: Context
) -> list[requests.InputItem]:
    """Return the input with referenced items. Raises ApiError."""
    found: dict[int, bytes] = {}
    for i, item in enumerate(asked.items):
        if isinstance(item, requests.ItemReference):
            content = service.responses.item(context.owner, item.item_id)
            if content is None:
                raise ApiError(
                    400,
                    f"input[{i}] refers to the item {item.item_id[:80]!r}, which is not stored: it "
                    "expired, was too large, had store: false, or never existed. Send the item "
                    "itself (with the AI SDK: store: false).",
                    "item_not_found",
                    "input",
                )
            found[i] = content
    referred = dict(zip(found, _parsed([*found.values()], service, context), strict=True))
    return [referred.get(i, item) for i, item in enumerate(asked.items)]


def _hold(size: int, service: Service, context: Context) -> None:
    """Reserve bytes of earlier responses, as of a body. Raises ApiError."""
    most = service.settings.max_body_bytes
    if size > most:
        raise ApiError(
            413,
            f"the referenced responses have {size} bytes; the limit is {most}. Begin another "
            "conversation.",
            "body_too_large",
            "input",
        )
    context.account.hold(BODY_COPIES * size)


class ResponseReply(Reply):
    """Answer in the format of responses."""

    def __init__(
        self,
        asked: requests.ResponseRequest,
        response_id: str,
        keep: KeepResponse,
        stored: bool,
        question: Question,
        stream: SpeechStream,
    ):
        """keep: stores the complete response. stored: other requests may then name it."""
        super().__init__(question, stream)
        self._set(asked, response_id, keep, stored)

    def _set(
        self, asked: requests.ResponseRequest, response_id: str, keep: KeepResponse, stored: bool
    ) -> None:
        self._asked, self._id, self._keep, self._stored = asked, response_id, keep, stored
        self._number = 0
        self._items = OutputItems(asked.in_spaces)
        self._ending: list[bytes] = []
        self._body = b""

    async def collect(self) -> None:
        """Read the stream to its end."""
        async for _ in self.pieces():
            pass

    def _first(self) -> list[bytes]:
        begun = self._object("in_progress")
        return [self._event(kind, {"response": begun}) for kind in _BEGINNING]

    async def _next(self, events: Sequence[Event]) -> list[bytes]:
        parts, _ = self._take(events)
        return [self._event(*event) for part in parts for event in self._items.add(part)]

    def _last(self) -> list[bytes]:
        return [
            *self._ending,
            self._framed(f"response.{self._status}", b'"response":' + self._body),
        ]

    def whole(self) -> bytes:
        """Return the response."""
        return self._body

    def _finish(self) -> None:
        super()._finish()
        self._ending = [self._event(*event) for event in self._items.finish(self._status)]
        self._body = to_json(self._object(self._status))
        output = {item["id"]: to_json(sent_back(item)) for item in self._items.items}
        self._keep(self._body, output)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reached_limit else "completed"

    def last_event(self, error: ApiError) -> bytes:
        """Return the event of an error that ends a streamed response."""
        list(self._items.end("incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        said = {"code": code, "message": error.message, "type": error.code}
        failed = self._object("failed") | {"error": said}
        return self._event("response.failed", {"response": failed})

    def _object(self, status: str) -> Json:
        asked, usage = self._asked, None
        if self._result is not None:
            usage = response_usage(self._result.timings, self._reasoning_tokens)
        form = None if asked.text is None else asked.text.format
        is_object = isinstance(form, ObjectFormat)
        choice = asked.tool_choice or "auto"
        truncation = (asked.model_extra or {}).get("truncation")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made: Json = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self._service.model.name,
            "output": self._items.items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._stored,
            "temperature": asked.temperature,
            "text": {
                "format": {"type": "text"}
                if form is None
                else form.model_dump(by_alias=True, exclude_none=is_object)
            },
            "tool_choice": choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": "disabled" if truncation in (None, "disabled") else "auto",
            "usage": usage,
            "user": None,
        }
        if self._context.warnings:
            made["warnings"] = self._context.warnings
        return made

    def _event(self, kind: str, fields: Json) -> bytes:
        return self._framed(kind, to_json(fields)[1:-1])

    def _framed(self, kind: str, fields: bytes) -> bytes:
        """Return the next event with its number. fields: its other fields in JSON."""
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._number}'
        self._number += 1
        return b"".join((head.encode(), b",", fields, b"}\n\n"))


class Prepared(ResponseReply):
    """Response without output (`generate: false`), which a later turn may continue."""

    takes_long = False
    _reached_limit = False

    def __init__(
        self,
        asked: requests.ResponseRequest,
        response_id: str,
        keep: KeepResponse,
        stored: bool,
        service: Service,
        context: Context,
    ):
        self._service, self._context, self._streams = service, context, bool(asked.stream)
        self._created, self._result, self._texts = int(time.time()), None, []
        self._set(asked, response_id, keep, stored)

    def begin(self) -> "Prepared":
        """Return itself: there is nothing to start."""
        return self

    answer = begin

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events."""
        first = self._first()
        self._finish()
        yield b"".join((*first, *self._last()))

    def _finish(self) -> None:
        self._body = to_json(self._object("completed"))
        self._keep(self._body, {})
