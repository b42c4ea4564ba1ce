"""Responses: a body, its chat request, and its output items and events."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError, from_json

from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai import chat_request as chat
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ClientObject,
    OneOf,
    refused_field,
)
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.serving.openai.fields import (
    LOGPROBS,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    check_only,
    further_fields,
    names_in,
)
from qwen3_omni_neuron.serving.openai.openapi import with_item_fields
from qwen3_omni_neuron.serving.openai.reply import (
    PUBLIC_ID_BYTES,
    Call,
    Content,
    Reasoning,
    ReplyPart,
    new_id,
)

Json = dict[str, Any]
_ITEMS = names_in(RESPONSES, "input[]")
NO_TOOLS = (
    "there are no built-in tools. Describe a function (type: function), and run it in the client"
)


def must(fit: Callable[[Any], bool], why: str) -> AfterValidator:
    """Return a validator that refuses other values with a sentence."""

    def check(value: Any) -> Any:
        if not fit(value):
            raise PydanticCustomError("unfit", "{why}", {"why": why})
        return value

    return AfterValidator(check)


class SaidPart(chat.Text):
    """Text of a message, or of a function's result."""

    further = names_in(RESPONSES, "input[].content[]")
    type: Literal["input_text", "output_text"]


class InputImagePart(chat.MediaObject):
    """An image by its URL, which may be a data URL."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("image"))
    type: Literal["input_image"]
    image_url: Annotated[str | None, must(bool, "no files are stored. Send a data URL")] = Field(
        None, validate_default=True
    )


class InputFilePart(chat.MediaObject):
    """A document, which is refused."""

    type: Annotated[
        Literal["input_file"],
        must(
            lambda _: False,
            "documents are not supported. Send text as input_text, or pages as input_image",
        ),
    ]


InputPart = Annotated[
    SaidPart
    | chat.RefusalPart
    | InputImagePart
    | chat.InputAudioPart
    | chat.AudioUrlPart
    | chat.VideoUrlPart
    | InputFilePart,
    OneOf(),
]
OutputPart = Annotated[
    SaidPart | chat.RefusalPart,
    OneOf("text: a function's result must be text here. Send media in a user message"),
]


class InputMessage(ClientObject):
    """One message of the conversation."""

    further = _ITEMS
    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[InputPart], OneOf("a string or a list of parts")]


class InputCall(ClientObject):
    """A call of a function by an earlier response. arguments: JSON text."""

    further = _ITEMS
    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CallOutput(ClientObject):
    """Result of a function that was called."""

    further = _ITEMS - {"*"}
    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    namespace: str | None = None  # its call has it, too
    output: Annotated[str | list[OutputPart], OneOf("a string or a list of parts")]


class EarlierReasoning(ClientObject):
    """Reasoning of an earlier response, which the model does not read."""

    further = _ITEMS
    type: Literal["reasoning"]


class ItemReference(ClientObject):
    """Id of a stored item of an earlier response."""

    type: Literal["item_reference"] | None = "item_reference"
    item_id: str = Field(alias="id")  # other items' ids have no effect


InputItem = Annotated[
    InputMessage | InputCall | CallOutput | EarlierReasoning | ItemReference,
    OneOf(role="message", id="item_reference"),
]
InputItems = Annotated[list[InputItem], Field(max_length=MOST_MESSAGES)]


class FlatNamedTool(ClientObject):
    """The function that the response must call."""

    type: Literal["function"]
    name: str = Field(min_length=1)


class FlatTool(ClientObject):
    """A function that the response may call."""

    further = names_in(RESPONSES, "tools[]")
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatAllowedTools(ClientObject):
    """Functions that the response may or must call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[FlatNamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


FlatToolChoice = Annotated[
    Literal["auto", "none", "required"] | FlatNamedTool | FlatAllowedTools,
    OneOf(f"auto, none, required, or an object of type function or allowed_tools: {NO_TOOLS}"),
]


class FlatSchemaFormat(chat.JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextSettings(ClientObject):
    """Format of the text. verbosity: without effect."""

    format: Annotated[chat.PlainFormat | chat.ObjectFormat | FlatSchemaFormat, OneOf()] | None = (
        None
    )
    verbosity: str | None = None


class ResponseQuery(ClientObject):
    """Query of GET /v1/responses/ID. stream: false; the others have no effect."""

    model_config = ConfigDict(strict=False)
    stream: bool = False
    include: list[str] = Field([])
    include_obfuscation: bool = False
    starting_after: int | None = None


class ItemsQuery(ClientObject):
    """Query of GET /v1/responses/ID/input_items. include: without effect.

    after: id of the item before the page. order: the conversation's, or reversed.
    """

    model_config = ConfigDict(strict=False)
    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: list[str] = Field([])


def fields_of_query(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a query's fields. Clients send the list as include or include[]."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name.removesuffix("[]") == "include":
            fields.setdefault("include", []).append(value)
        else:
            fields[name] = value
    return fields


_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[_Key, _Value], Field(max_length=16)]
"""OpenAI's field, with its limits."""


class ResponseRequest(chat.TextRequest):
    """Body of POST /v1/responses."""

    further = further_fields(RESPONSES, chat.CHAT_OPTIONS, REFUSED_IN_RESPONSES)
    type: Literal["response.create"] | None = None  # of an event
    generate: bool | None = None
    input: Annotated[str | InputItems, OneOf("a string or a list of items")] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FlatTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input or []

    @property
    def names_earlier(self) -> bool:
        """True if it names an earlier response, or an item of one."""
        return self.previous_response_id is not None or any(
            isinstance(item, ItemReference) for item in self.items
        )


def check_response_request(asked: ResponseRequest) -> None:
    """Refuse fields of other paths or only of OpenAI. Raises ApiError."""
    check_only(asked.model_extra or {}, REFUSED_IN_RESPONSES)
    if asked.top_logprobs and LOGPROBS not in (asked.include or ()):
        raise wrong_value(f"top_logprobs needs include: [{LOGPROBS}].", "top_logprobs")


def chat_request_of(
    asked: ResponseRequest, items: Iterable[tuple[str, InputItem]], context_length: int
) -> tuple[chat.ChatRequest, list[str]]:
    """Return a chat request, and its messages' names for errors. Raises ApiError.

    items: the whole conversation's, by name, without references.
    """
    messages, names = list[chat.Message](), list[str]()
    if asked.instructions:
        messages.append(chat.Message(role="system", content=asked.instructions))
        names.append("instructions")
    other = names_in(RESPONSES, "") | REFUSED_IN_RESPONSES.keys()
    more = {n: v for n, v in (asked.model_extra or {}).items() if n not in other}
    if asked.max_output_tokens is None:
        # Clients treat an end at a limit that they did not set as a failure.
        more.setdefault("thinker_max_new_tokens", context_length)
    same = ("stream", "temperature", "top_p", "seed", "stop", "top_logprobs")
    more |= {name: getattr(asked, name) for name in same}
    form: Any = None if asked.text is None else asked.text.format
    if isinstance(form, FlatSchemaFormat):
        form = chat.JsonSchemaFormat(type="json_schema", json_schema=form)
    tools: Any = chat.function_tools(asked.tools or ())
    choice: Any = asked.tool_choice
    if isinstance(choice, FlatNamedTool):
        choice = _named(choice)
    elif isinstance(choice, FlatAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    for where, item in items:
        pause()
        message = _message(item, messages)
        if message is not None:
            messages.append(message)
            names.append(where)
    if not messages:
        raise wrong_value("input has no message. Give at least one.", "input")
    try:
        wanted = chat.ChatRequest(
            model=asked.model or "",
            messages=messages,
            logprobs=LOGPROBS in (asked.include or ()),
            max_completion_tokens=asked.max_output_tokens,
            tools=tools,
            tool_choice=None if choice == "auto" and not tools else choice,
            parallel_tool_calls=asked.parallel_tool_calls if tools else None,
            response_format=form,
            **more,
        )
    except ValidationError as error:
        raise refused_field(error) from error
    return wanted, names


def _message(item: InputItem, before: Sequence[chat.Message]) -> chat.Message | None:
    """Return an item as a message; None without one, or if the last one gets it."""
    made = chat.Message.model_construct  # the items are validated
    if isinstance(item, InputMessage):
        return made(role=item.role, content=item.content)
    if isinstance(item, CallOutput):
        return made(role="tool", tool_call_id=item.call_id, content=item.output)
    if isinstance(item, InputCall):
        function = chat.CalledFunction(
            name=chat.in_space(item.namespace, item.name), arguments=item.arguments
        )
        call = chat.ToolCall(id=item.call_id, function=function)
        last = before[-1] if before and before[-1].role == "assistant" else None
        calls = [] if last is None else last.tool_calls or []
        if last is None or len(calls) == MOST_TOOLS:
            return made(role="assistant", tool_calls=[call])
        last.tool_calls = [*calls, call]
    return None


def _named(tool: FlatNamedTool) -> Json:
    return {"type": "function", "function": {"name": tool.name}}


_SAID = ("type", "role", "content", "call_id", "name", "namespace", "arguments", "output")
ResponseEvent = tuple[str, Json]
"""Type and fields of an event, without its number."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """Items of one response: a text, reasoning or call each, in the order of the reply.

    items: so far, in OpenAI's form; the last one may be in progress.
    """

    def __init__(self, in_spaces: Mapping[str, tuple[str, str]]):
        """in_spaces: see `ResponseRequest.in_spaces`."""
        self.items: list[Json] = []
        self._in_spaces = in_spaces
        self._texts: list[str] = []  # parts of the item in progress
        self._logprobs: list[Json] = []
        self._open: str | None = None  # its type

    def add(self, part: ReplyPart) -> Iterator[ResponseEvent]:
        """Add the next part of the reply. Yields its events."""
        if isinstance(part, Call):
            yield from self.end()
            yield from self._call(part)
            return
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        if self._open != kind:
            yield from self.end()
            yield from self._begin(kind)
        self._texts.append(part.text)
        logprobs = part.logprobs if isinstance(part, Content) else ()
        self._logprobs += logprobs
        yield self._of_part(f"response.{self._text_kind}.delta", logprobs, delta=part.text)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """End the last item with a status. Yields its events.

        A reply without text and call is an empty message: clients expect one.
        """
        if all(item["type"] == "reasoning" for item in self.items) and self._open != "message":
            yield from self.end()
            yield from self._begin("message")
        yield from self.end(status)

    def end(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """End the text in progress, if any. Yields its events."""
        if self._open is None:
            return
        kind, text, item = self._text_kind, "".join(self._texts), self.items[-1]
        item |= {"status": status, "content": [_text_part(kind, text, self._logprobs)]}
        yield self._of_part(f"response.{kind}.done", self._logprobs, text=text)
        yield self._of_part("response.content_part.done", part=item["content"][0])
        yield self._of_item("response.output_item.done")
        self._open = None

    def _begin(self, kind: str) -> Iterator[ResponseEvent]:
        self._open, self._texts, self._logprobs = kind, [], []
        own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"id": _item_id(kind), "type": kind, **own, "status": "in_progress", "content": []}
        self.items.append(item)
        yield self._of_item("response.output_item.added")
        yield self._of_part("response.content_part.added", part=_text_part(self._text_kind, ""))

    def _call(self, call: Call) -> Iterator[ResponseEvent]:
        name = _item_id("function_call")
        space, function = self._in_spaces.get(call.name, (None, call.name))
        item = {"id": name, "type": "function_call", "call_id": call.id, "name": function}
        item |= {} if space is None else {"namespace": space}
        self.items.append(item | {"status": "in_progress", "arguments": ""})
        yield self._of_item("response.output_item.added")
        where = {"item_id": name, "output_index": len(self.items) - 1}
        status = "completed" if call.complete else "incomplete"
        self.items[-1] |= {"status": status, "arguments": call.arguments}
        arguments = "response.function_call_arguments"
        yield f"{arguments}.delta", where | {"delta": call.arguments}
        yield f"{arguments}.done", where | {"arguments": call.arguments, "name": function}
        yield self._of_item("response.output_item.done")

    @property
    def _text_kind(self) -> str:
        return "output_text" if self._open == "message" else "reasoning_text"

    def _of_item(self, event: str) -> ResponseEvent:
        return event, {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _of_part(self, event: str, logprobs: Sequence[Json] = (), **more: Any) -> ResponseEvent:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        fields = {**where, "content_index": 0, **more}
        if event.startswith("response.output_text"):
            fields["logprobs"] = [_in_event(one) for one in logprobs]
        return event, fields


def sent_back(item: Json) -> Json:
    """Return an item for a later turn: without long log-probabilities."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def with_ids(items: Iterable[Json]) -> dict[str, bytes]:
    """Return an input's items in JSON by id, which is the client's unless repeated."""
    made = dict[str, bytes]()
    for item in items:
        pause()
        name = item.get("id")
        if not isinstance(name, str) or name in made:
            name = _item_id(item.get("type", "message"))
        made[name] = to_json(item | {"id": name})
    return made


def newly_listed(earlier: Mapping[str, bytes], items: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a turn's items that its conversation's list lacks, by their ids there.

    Omits repeated items; another item with the same id gets a new one.
    """
    made = dict[str, bytes]()
    for own, content in items.items():
        name, number = own, 1
        while (before := made.get(name, earlier.get(name))) is not None:
            pause()
            if _said(before) == _said(content):
                break
            number += 1
            name = f"{own}_{number}"
        else:
            made[name] = content
    return made


def listed(name: str, content: bytes) -> Json:
    """Return an item in a list's form, with id, type, status and parts."""
    made = {"type": "message", "status": "completed", **from_json(content), "id": name}
    said = made.get("content")
    if isinstance(said, str):
        kind = "output_text" if made["role"] == "assistant" else "input_text"
        made["content"] = [_text_part(kind, said)]
    return made


def _said(content: bytes) -> Json:
    """Return an item's content, without fields that clients omit or add."""
    item = listed("", content)
    said = {name: item.get(name) for name in _SAID}
    if isinstance(said["content"], list):
        said["content"] = [
            {name: value for name, value in part.items() if name not in ("annotations", "logprobs")}
            for part in said["content"]
        ]
    return said


def _text_part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    part: Json = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "output_text" else part


def _item_id(kind: str) -> str:
    return new_id(f"{_PREFIXES.get(kind, 'fco')}_", PUBLIC_ID_BYTES)


def _in_event(logprob: Json) -> Json:
    """Return a token's log-probability for events: without its bytes."""
    bare = {"token": logprob["token"], "logprob": logprob["logprob"]}
    if "top_logprobs" in logprob:
        bare["top_logprobs"] = [_in_event(other) for other in logprob["top_logprobs"]]
    return bare
