"""Body of a Responses request, and the chat request that it becomes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from qwen3_omni_neuron.serving.openai import bodies
from qwen3_omni_neuron.serving.openai import chat_request as chat
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import (
    LOGPROBS,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    names_in,
)
from qwen3_omni_neuron.serving.openai.openapi import (
    no_effect_schemas,
    schemas_of_options,
    with_item_fields,
)
from qwen3_omni_neuron.serving.openai.voices import VoiceName

FURTHER_RESPONSE_FIELDS: Mapping[str, Any] = {
    **schemas_of_options(chat.CHAT_OPTIONS),
    **bodies.ENGINE_FIELDS,
    **no_effect_schemas(RESPONSES),
    **{
        name: {"enum": [value, None]}
        for name, (value, _) in REFUSED_IN_RESPONSES.items()
        if value is not None
    },
}
"""Schemas of the fields that a request may have beside those of `ResponseRequest`."""


class InputTextPart(bodies.OpenObject):
    """Text of a message, or of a function's result."""

    type: Literal["input_text"]
    text: str


class OutputTextPart(bodies.OpenObject):
    """Text of an assistant's message."""

    type: Literal["output_text"]
    text: str


class InputImagePart(bodies.OpenObject):
    """An image by its URL, which may be a data URL."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("image"))

    type: Literal["input_image"]
    image_url: str | None = None


class InputFilePart(bodies.OpenObject):
    """A document, which is refused."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_file"]


InputPart = Annotated[
    InputTextPart
    | OutputTextPart
    | chat.RefusalPart
    | InputImagePart
    | chat.InputAudioPart
    | chat.AudioUrlPart
    | chat.VideoUrlPart
    | InputFilePart,
    bodies.ByType(),
]
InputContent = Annotated[str | list[InputPart], bodies.ByForm("a string", "a list of parts")]


class InputMessage(bodies.OpenObject):
    """One message of the conversation."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent


class InputCall(bodies.OpenObject):
    """A call of a function by an earlier response. arguments: JSON text."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class CallOutput(bodies.OpenObject):
    """Result of a function that was called."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: InputContent


class EarlierReasoning(bodies.OpenObject):
    """Reasoning of an earlier response, which the model does not get again."""

    type: Literal["reasoning"]


class ItemReference(bodies.StrictObject):
    """Id of an item of an earlier response, which is kept here."""

    type: Literal["item_reference"] | None = "item_reference"
    item_id: str = Field(alias="id")  # other items have an id without effect


InputItem = Annotated[
    InputMessage | InputCall | CallOutput | EarlierReasoning | ItemReference,
    bodies.ByType({"role": "message", "id": "item_reference"}),
]
InputItems = Annotated[list[InputItem], Field(max_length=bodies.MOST_MESSAGES)]
Input = Annotated[str | InputItems, bodies.ByForm("a string", "a list of items")]


class FlatTool(bodies.OpenObject):
    """A tool that the response may call. Those of OpenAI's own are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamedTool(bodies.StrictObject):
    """A tool by its name."""

    type: str
    name: str | None = None


class FlatToolChoice(FlatNamedTool):
    """The function that the response must call, or those that it may or must call one of."""

    mode: Literal["auto", "required"] | None = None
    tools: list[FlatNamedTool] | None = Field(None, min_length=1, max_length=bodies.MOST_TOOLS)


ChosenFlatTool = Annotated[
    Literal["auto", "none", "required"] | FlatToolChoice,
    bodies.ByForm("auto, none, required", "an object"),
]


class FlatSchemaFormat(chat.JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


FlatFormat = Annotated[chat.TextFormat | chat.JsonObjectFormat | FlatSchemaFormat, bodies.ByType()]


class TextSettings(bodies.StrictObject):
    """Format of the text. verbosity: without effect."""

    format: FlatFormat | None = None
    verbosity: str | None = None


class ResponseQuery(BaseModel):
    """Query of GET /v1/responses/ID, as `fields_of_query` reads it.

    stream: false, as a response that has ended is not streamed again. The others have no effect.
    """

    model_config = ConfigDict(extra="forbid")

    stream: bool = False
    include: list[str] = []
    include_obfuscation: bool = False
    starting_after: int | None = None


class ItemsQuery(BaseModel):
    """Query of GET /v1/responses/ID/input_items, as `fields_of_query` reads it.

    after: id of the item before the first one of the page. limit: most items of a page. order: by
    the conversation's, or its reverse. include: without effect.
    """

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: list[str] = []


def fields_of_query(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a query. Its one list, include, is sent as include or include[]."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name.removesuffix("[]") == "include":
            fields.setdefault("include", []).append(value)
        else:
            fields[name] = value
    return fields


class StreamedSound(bodies.StrictObject):
    """Voice of the speech, whose format is 16-bit PCM at 24 kHz."""

    voice: VoiceName | None = None
    format: Literal["pcm16"] = "pcm16"


Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
"""OpenAI's, with its limits."""


class ResponseRequest(chat.SampledBody):
    """Body of POST /v1/responses.

    Further fields are options of a request (`options.RequestArguments`), or those of OpenAI's that
    have no effect.
    """

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: StreamedSound | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FlatTool] | None = Field(None, max_length=bodies.MOST_TOOLS)
    tool_choice: ChosenFlatTool | None = None
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
        """True where it names an earlier response, or an item of one."""
        return self.previous_response_id is not None or any(
            isinstance(item, ItemReference) for item in self.items
        )

    @property
    def tells_logprobs(self) -> bool:
        """True where its text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def keeps(self) -> bool:
        """True where the response is kept for later turns."""
        return self.store is not False


def check_response_request(asked: ResponseRequest, *, answered: bool = True) -> None:
    """Refuse what only other paths or OpenAI itself have. Raises ApiError.

    answered: False where its tokens are counted alone, so that no speech needs a place.
    """
    for name, (only, instead) in REFUSED_IN_RESPONSES.items():
        value = (asked.model_extra or {}).get(name)
        if value is not None:
            bodies.check_only(name, value, only, instead)
    # Here, and not in the chat request, whose fields have other names.
    bodies.check_known(
        asked, FURTHER_RESPONSE_FIELDS.keys() | REFUSED_IN_RESPONSES.keys(), chat.CHAT_OPTIONS
    )
    if asked.top_logprobs and not asked.tells_logprobs:
        raise wrong_value(f"top_logprobs needs include: [{LOGPROBS}].", "top_logprobs")
    if answered and "audio" in (asked.modalities or ()) and not asked.stream:
        raise wrong_value(
            "speech is in streamed responses alone, as OpenAI's response has no place for it. "
            "Take stream: true, or POST /v1/chat/completions for speech in one piece.",
            "modalities",
        )
    for i, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            raise _no_such_tool(f"tools[{i}]", tool.type, f"tools[{i}].type")
        if not tool.name:
            raise wrong_value(f"tools[{i}] has no name.", f"tools[{i}].name")
        bodies.check_further(tool, f"tools[{i}]", names_in(RESPONSES, "tools[]"))


def _no_such_tool(where: str, kind: str, param: str) -> ApiError:
    return wrong_value(
        f"{where} is of type {kind[:80]!r}, which is not supported: there are no built-in tools. "
        "Describe a function (type: function), and run it where its call arrives.",
        param,
    )


def chat_request_of(
    asked: ResponseRequest, items: Iterable[tuple[str, InputItem]], context_length: int
) -> tuple[chat.ChatRequest, list[str]]:
    """Return a request as a chat request, and the names of its messages for errors.

    items: items of the whole conversation by their names, without references. Raises ApiError.
    """
    messages, names = list[chat.Message](), list[str]()
    if asked.instructions:
        messages.append(chat.Message(role="system", content=asked.instructions))
        names.append("instructions")
    other = names_in(RESPONSES, "") | REFUSED_IN_RESPONSES.keys()
    more = {n: v for n, v in (asked.model_extra or {}).items() if n not in other and v is not None}
    if asked.max_output_tokens is None:
        # Clients take the end at a limit that they have not set for a failure.
        more.setdefault("thinker_max_new_tokens", context_length)
    same = ("stream", "modalities", "temperature", "top_p", "seed", "stop", "top_logprobs")
    more |= {name: getattr(asked, name) for name in same}
    form: Any = None if asked.text is None else asked.text.format
    if isinstance(form, FlatSchemaFormat):
        form = chat.JsonSchemaFormat(type="json_schema", json_schema=form)
    choice = asked.tool_choice
    tools = [
        chat.Tool(type="function", function=chat.Function(**chat.declared(tool, chat.Function)))
        for tool in asked.tools or ()
    ]
    try:
        for where, item in items:
            message = _message(item, where, messages)
            if message is not None:
                messages.append(message)
                names.append(where)
        if not messages:
            raise wrong_value("input has no message. Give at least one.", "input")
        wanted = chat.ChatRequest(
            model=asked.model or "",
            messages=messages,
            audio=chat.AudioOutput(
                voice=asked.audio.voice if asked.audio else None, format="pcm16"
            ),
            logprobs=asked.tells_logprobs,
            max_completion_tokens=asked.max_output_tokens,
            tools=tools,
            tool_choice=None if choice == "auto" and not tools else _tool_choice(choice),
            parallel_tool_calls=asked.parallel_tool_calls if tools else None,
            response_format=form,
            **more,
        )
    except ValidationError as error:
        raise bodies.refused_field(error) from error
    return wanted, names


def _message(item: InputItem, where: str, before: Sequence[chat.Message]) -> chat.Message | None:
    """Return an item as a message, None where it has none or is added to the last one before it.

    Raises ApiError for a field that is not in the table, unless a response has said the item.
    """
    said = isinstance(item, InputCall | EarlierReasoning)
    said = said or (isinstance(item, InputMessage) and item.role == "assistant")
    names = names_in(RESPONSES, "input[]")
    bodies.check_further(item, where, names if said else names - {"*"})
    if isinstance(item, InputCall):
        function = chat.CalledFunction(name=item.name, arguments=item.arguments)
        call, last = (
            chat.ToolCall(id=item.call_id, function=function),
            before[-1] if before else None,
        )
        calls = [] if last is None else last.tool_calls or []
        if last is None or last.role != "assistant" or len(calls) == bodies.MOST_TOOLS:
            return chat.Message(role="assistant", tool_calls=[call])
        last.tool_calls = [*calls, call]
    elif isinstance(item, CallOutput):
        content = _content(item.output, f"{where}.output")
        for i, part in enumerate(() if isinstance(content, str) else content):
            if not isinstance(part, chat.TextPart | chat.RefusalPart):
                place = f"{where}.output[{i}]"
                raise wrong_value(
                    f"{place} is {part.type}: the result of a function is text here. Send it in a "
                    "message of the user, after the result.",
                    place,
                )
        return chat.Message(role="tool", tool_call_id=item.call_id, content=content)
    elif isinstance(item, InputMessage):
        return chat.Message(role=item.role, content=_content(item.content, f"{where}.content"))
    return None


def _content(content: InputContent, where: str) -> chat.Content:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: InputPart, where: str) -> chat.MessagePart:
    """Return a part of a chat's message, which checks its further fields. Raises ApiError."""
    further = part.model_extra or {}
    if isinstance(part, InputTextPart | OutputTextPart):
        return chat.TextPart(type="text", text=part.text, **further)
    if isinstance(part, InputImagePart):
        if part.image_url is None:
            raise wrong_value(
                f"{where} has no image_url, and no files are stored here. Send the image as a data "
                "URL.",
                f"{where}.image_url",
            )
        url = chat.MediaUrl(url=part.image_url)
        return chat.ImageUrlPart(type="image_url", image_url=url, **further)
    if isinstance(part, InputFilePart):
        raise wrong_value(
            f"{where} is a file: documents are not read. Send its text as input_text, or its pages "
            "as input_image.",
            where,
        )
    return part


def _tool_choice(choice: str | FlatToolChoice | None) -> Any:
    """Return the tool choice of a chat request. Raises ApiError."""
    if not isinstance(choice, FlatToolChoice):
        return choice
    if choice.type != "allowed_tools":
        return _named(choice, "tool_choice")
    tools = [_named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(choice.tools or ())]
    if not tools:
        raise wrong_value("tool_choice.tools is empty. Name at least one function.", "tool_choice")
    names = chat.AllowedNames(mode=choice.mode or "auto", tools=tools)
    return chat.AllowedTools(type="allowed_tools", allowed_tools=names)


def _named(tool: FlatNamedTool, where: str) -> chat.NamedTool:
    if tool.type != "function":
        raise _no_such_tool(where, tool.type, "tool_choice")
    if not tool.name:
        raise wrong_value(f"{where} has no name.", "tool_choice")
    return chat.NamedTool(type="function", function=chat.FunctionName(name=tool.name))
