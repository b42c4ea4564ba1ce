"""Body of a chat request, and its messages and options for the API."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from qwen3_omni_neuron.errors import did_you_mean, format_value
from qwen3_omni_neuron.options import REQUEST_OPTIONS
from qwen3_omni_neuron.prompt.media.fields import fields_of, read_fields
from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ClientObject,
    OneOf,
    lower_name,
)
from qwen3_omni_neuron.serving.openai.errors import UNKNOWN, ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import (
    CHAT,
    Seed,
    VoiceName,
    Voices,
    bounded_options,
    check_lengths,
    engine_options,
    further_fields,
    names_in,
)
from qwen3_omni_neuron.serving.openai.grammar_fields import grammar_of
from qwen3_omni_neuron.serving.openai.openapi import with_item_fields
from qwen3_omni_neuron.serving.settings import ServerSettings

# Request options without an OpenAI field that the server does not set.
CHAT_OPTIONS = frozenset(option.name for option in REQUEST_OPTIONS) - {
    *("seed", "stop", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "literal_text"),
    *("top_logprobs", "owner"),
}
MOST_PICTURES = 768  # frames of a video of pictures, as sampled from a file
Json = dict[str, Any]
ReadMedia = Callable[[Mapping[str, Any], str], Json]
"""Function (part, where) that turns a part's medium into an API item. Raises ApiError."""
Transcript = Callable[[str], str | None]
"""Function (id) -> an earlier spoken reply's text."""

_OF_OMNI = "of vllm-omni's clients"
_PARTS = names_in(CHAT, "messages[].content[]")
# vllm-omni's sampling fields of its stages, and request options.
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
_STAGES: Sequence[Mapping[str, str]] = (
    {name: f"thinker_{name}" for name in _SAMPLING}
    | {"max_tokens": "thinker_max_new_tokens", "seed": "seed"},
    {name: f"talker_{name}" for name in _SAMPLING} | {"max_tokens": "talker_max_new_tokens"},
    {},
)


class Text(ClientObject):
    """Base of parts with text."""

    type: str
    text: str


class TextPart(Text):
    """Text of a message."""

    further = _PARTS
    type: Literal["text"]


class RefusalPart(ClientObject):
    """Text of an assistant's message that refused an answer."""

    further = _PARTS
    type: Literal["refusal"]
    refusal: str


class MediaObject(ClientObject):
    """Base of parts with a medium, and their objects: MediaReader checks further fields."""

    further = ("*",)


class SoundData(MediaObject):
    """A sound file in base64, or its URL; its format is found in its content."""

    data: str
    format: str | None = Field(None, max_length=80)


class InputAudioPart(MediaObject):
    """Sound, as OpenAI's clients send it."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("audio"))
    type: Literal["input_audio"]
    input_audio: SoundData


class MediaUrl(MediaObject):
    """A data URL, or one of an allowed host. It may have the part's fields."""

    url: str


class AudioUrlPart(MediaObject):
    """Sound by its URL."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("audio"))
    type: Literal["audio_url"]
    audio_url: MediaUrl


class ImageUrlPart(MediaObject):
    """An image by its URL."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("image"))
    type: Literal["image_url"]
    image_url: MediaUrl


class VideoUrlPart(MediaObject):
    """A video by its URL."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("video"))
    type: Literal["video_url"]
    video_url: MediaUrl


class VideoPart(MediaObject):
    """A video as the URLs of its frames, images of one size. fps: their rate, by default 2."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("video"))
    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MOST_PICTURES)


MediaPart = InputAudioPart | AudioUrlPart | ImageUrlPart | VideoUrlPart | VideoPart
MessagePart = Annotated[TextPart | RefusalPart | MediaPart, OneOf()]
Content = Annotated[str | list[MessagePart], OneOf("a string or a list of parts")]


class EarlierAudio(ClientObject):
    """Id of the speech of an earlier reply."""

    further = names_in(CHAT, "messages[].audio")
    id: str


class CalledFunction(ClientObject):
    """Name of a function and its arguments, in JSON."""

    further = names_in(CHAT, "messages[].tool_calls[].function")
    name: str
    arguments: str


class ToolCall(ClientObject):
    """Call of a tool in an assistant's message."""

    further = names_in(CHAT, "messages[].tool_calls[]")
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(ClientObject):
    """One message of the conversation."""

    further = names_in(CHAT, "messages[]")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    audio: EarlierAudio | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None


class Function(ClientObject):
    """Description of a function."""

    further = names_in(CHAT, "tools[].function")
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(ClientObject):
    """A tool that the reply may call."""

    further = names_in(CHAT, "tools[]")
    type: Literal["function"]
    function: Function


class FunctionName(ClientObject):
    """Name of a function."""

    name: str


class NamedTool(ClientObject):
    """The function that the reply must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedNames(ClientObject):
    """Functions that the reply may or must call."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(ClientObject):
    """Some of the tools; the model sees the others, but can't call them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool | AllowedTools,
    OneOf("auto, none, required or an object of type function or allowed_tools"),
]


class PlainFormat(ClientObject):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(ClientObject):
    """A JSON object: any, or of a schema."""

    type: Literal["json_object"]
    schema_: Json | None = Field(None, alias="schema")


class JsonSchema(ClientObject):
    """A JSON schema by its name."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(ClientObject):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ProcessorSettings(ClientObject):
    """Fields of all images and videos of a request, and use_audio_in_video."""

    model_config = ConfigDict(json_schema_extra=with_item_fields("video"))
    further = fields_of("video", over_http=True)
    use_audio_in_video: bool | None = None


class AudioOutput(ClientObject):
    """Voice and format of the speech."""

    voice: VoiceName | None = None
    format: Annotated[
        Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"], lower_name(pcm="pcm16", ogg="opus")
    ] = "wav"


class StreamOptions(ClientObject):
    """Options of a streamed answer."""

    further = names_in(CHAT, "stream_options")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def continuous(self) -> bool:
        """True if each piece has the usage so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


def in_space(space: str | None, name: str) -> str:
    """Return the model's name for a function in a namespace."""
    return name if space is None else f"{space.rstrip('_')}__{name}"


def _named_in(space: str, tool: Mapping[str, Any], names: dict[str, tuple[str, str]]) -> Json:
    """Return a tool, flat or with a function, renamed for its namespace; note the name."""
    inner = tool.get("function")
    if isinstance(inner, Mapping):
        return {**tool, "function": _named_in(space, inner, names)}
    if not isinstance(tool.get("name"), str):
        return dict(tool)
    name = in_space(space, tool["name"])
    names[name] = (space, tool["name"])
    return {**tool, "name": name}


class TextRequest(ClientObject):
    """Fields common to all text endpoints."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    stop: Annotated[str | list[str], OneOf("a string or a list of strings")] | None = None
    _skipped: list[str] = PrivateAttr(default_factory=list)
    _in_spaces: dict[str, tuple[str, str]] = PrivateAttr(default_factory=dict)

    @property
    def skipped(self) -> Sequence[str]:
        """Types of skipped tools, which only their client or OpenAI could run."""
        return self._skipped

    @property
    def in_spaces(self) -> Mapping[str, tuple[str, str]]:
        """Namespaces and names of functions in namespaces, by the model's name for them."""
        return self._in_spaces

    @model_validator(mode="wrap")
    @classmethod
    def _with_functions(cls, given: Any, handler: Callable[[Any], "TextRequest"]) -> "TextRequest":
        """Keep tools of type function, also in namespaces."""
        listed = given.get("tools") if isinstance(given, Mapping) else None
        skipped, in_spaces, tools = list[str](), dict[str, tuple[str, str]](), list[Any]()
        for tool in listed if isinstance(listed, list) else ():
            fields: Mapping[str, Any] = tool if isinstance(tool, Mapping) else {}
            kind, space, inner = (fields.get(name) for name in ("type", "name", "tools"))
            if kind == "namespace" and isinstance(space, str) and isinstance(inner, list):
                for one in inner:
                    if isinstance(one, Mapping) and one.get("type") == "function":
                        tools.append(_named_in(space, one, in_spaces))
            elif kind == "function" or not isinstance(kind, str):
                tools.append(tool)
            else:
                skipped.append(kind[:80])
        made = handler({**given, "tools": tools} if isinstance(listed, list) else given)
        made._skipped, made._in_spaces = skipped, in_spaces
        return made


class ChatRequest(TextRequest):
    """Body of POST /v1/chat/completions."""

    further = further_fields(CHAT, CHAT_OPTIONS, {})
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    modalities: list[Literal["text", "audio"]] | None = Field(None, min_length=1)
    audio: AudioOutput | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[PlainFormat | ObjectFormat | JsonSchemaFormat, OneOf()] | None = None
    sampling_params_list: list[Json] | None = Field(None, max_length=3, description=_OF_OMNI)
    mm_processor_kwargs: ProcessorSettings | None = Field(None, description=_OF_OMNI)

    @property
    def speaks(self) -> bool:
        """True if the answer has speech."""
        return "audio" in (self.modalities or ())

    @property
    def in_vllm_omnis_way(self) -> bool:
        """True if the client requests speech in vllm-omni's form, without `audio`."""
        return self.speaks and self.audio is None

    @property
    def sound_format(self) -> str:
        """Format of the speech."""
        return "wav" if self.audio is None else self.audio.format


def check_request(wanted: ChatRequest) -> None:
    """Refuse unsupported fields and combinations. Raises ApiError."""
    if wanted.stream and wanted.speaks and wanted.sound_format == "flac":
        message = "flac can't be streamed. Use pcm16, wav, mp3, opus or aac, or stream: false."
        raise wrong_value(message, "audio.format")
    if wanted.top_logprobs and not wanted.logprobs:
        raise wrong_value("top_logprobs needs logprobs: true.", "top_logprobs")


def request_options(
    wanted: ChatRequest, settings: ServerSettings, owner: str, voices: Voices, thinks: bool
) -> Json:
    """Return the Python API's options for a request's fields. Raises ApiError.

    thinks: the checkpoint's template lets a reply begin with reasoning.
    """
    given: Json = {}
    if wanted.audio is not None and wanted.audio.voice is not None:
        given["speaker"] = voices.speaker(wanted.audio.voice, "audio.voice")
    most = wanted.max_completion_tokens or wanted.max_tokens
    if most is not None:
        given["thinker_max_new_tokens"] = most
    options = _stage_options(wanted) | text_options(wanted, CHAT_OPTIONS, given, thinks)
    options = bounded_options(options, settings, owner) | {"literal_text": True}
    if wanted.logprobs:
        options |= {"logprobs": True, "top_logprobs": wanted.top_logprobs or 0}
    choice = wanted.tool_choice
    if wanted.tools and choice != "none":
        options["tools"] = function_tools(tool.function for tool in wanted.tools)
    if choice not in (None, "none"):
        options["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
    if wanted.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = wanted.parallel_tool_calls
    asked = grammar_of(wanted.model_extra or {})
    form, schema = wanted.response_format, {"type": "object"}
    if isinstance(form, JsonSchemaFormat | ObjectFormat):
        if asked is not None or "grammar" in options:
            other = "grammar" if asked is None else asked[0]
            raise wrong_value(f"give response_format or {other}, not both.", "response_format")
        own = form.json_schema if isinstance(form, JsonSchemaFormat) else form
        options["grammar"] = {"json": schema if own.schema_ is None else own.schema_}
        if isinstance(own, JsonSchema):
            options["grammar"]["strict"] = own.strict is True
    elif asked is not None:
        if "grammar" in options:
            raise wrong_value(f"give {asked[0]} or grammar, not both.", asked[0])
        options["grammar"] = asked[1]
    check_lengths(options)
    return options


def text_options(
    wanted: TextRequest, names: frozenset[str], given: Mapping[str, Any], thinks: bool
) -> Json:
    """Return the options for text endpoints' common fields. Raises ApiError.

    names: options allowed by their own names. given: options from other fields.
    """
    extra = wanted.model_extra or {}
    options = {**engine_options(extra, thinks), **given}
    if wanted.seed is not None:
        options["seed"] = wanted.seed
    if wanted.temperature is not None:
        options["thinker_do_sample"] = wanted.temperature > 0
        if wanted.temperature > 0:
            options["thinker_temperature"] = max(wanted.temperature, 1e-6)
    if wanted.top_p is not None:
        options["thinker_top_p"] = max(wanted.top_p, 1e-6)
    if wanted.stop:
        options["stop"] = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    for name in names & extra.keys():
        if options.setdefault(name, extra[name]) != extra[name]:
            raise wrong_value(
                f"{name} is {format_value(extra[name])}, but another field sets it to "
                f"{format_value(options[name])}. Give one of them.",
                name,
            )
    return options


def _stage_options(wanted: ChatRequest) -> Json:
    options: Json = {}
    for number, stage in enumerate(wanted.sampling_params_list or ()):
        ours, place = _STAGES[number], f"sampling_params_list[{number}]"
        known = ours.keys() | names_in(CHAT, place)
        for name, value in stage.items():
            if value is not None and name not in known:
                message = f"{place}.{name[:80]}: this field is unknown here."
                message += did_you_mean(name, known)
                raise wrong_value(message, f"{place}.{name}"[:200], UNKNOWN)
        given = {ours[name]: stage[name] for name in ours if stage.get(name) is not None}
        if ours and stage.get("temperature") == 0:
            temperature = ours["temperature"]
            del given[temperature]
            given[temperature.replace("temperature", "do_sample")] = False
        if stage.get("top_k") == -1:
            given[ours["top_k"]] = 0
        options |= given
    processor = wanted.mm_processor_kwargs
    if processor is not None and processor.use_audio_in_video is not None:
        options["use_audio_in_video"] = processor.use_audio_in_video
    return options


def item_fields(wanted: ChatRequest) -> Json:
    """Return the checked fields of a request's images and videos. Raises ApiError."""

    def refusal(message: str, name: str | None) -> ApiError:
        return wrong_value(message, f"{where}.{name}" if name else where)

    where, given = "mm_processor_kwargs", wanted.mm_processor_kwargs
    extra = None if given is None else given.model_extra
    return read_fields("video", extra or {}, where, refusal, over_http=True)


def function_tools(functions: Iterable[BaseModel]) -> list[Json]:
    """Return functions, which have the fields of `Function`, as tools of the API."""
    given = ({name: getattr(one, name) for name in Function.model_fields} for one in functions)
    made = ({name: value for name, value in one.items() if value is not None} for one in given)
    return [{"type": "function", "function": one} for one in made]


def conversation(
    wanted: ChatRequest,
    read_media: ReadMedia,
    transcript: Transcript,
    names: Sequence[str] | None = None,
) -> list[Json]:
    """Return the messages for the model, and read their media. Raises ApiError.

    names: the messages' in errors; None: messages[0] and so on.
    """
    names = [f"messages[{i}]" for i in range(len(wanted.messages))] if names is None else names
    read = list[Json]()
    for message, where in zip(wanted.messages, names, strict=True):
        pause()
        read.append(_message(message, where, read_media, transcript))
    return read


def _message(message: Message, where: str, read_media: ReadMedia, transcript: Transcript) -> Json:
    _check_message(message, where)
    made: Json = {"role": "system" if message.role == "developer" else message.role}
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    content = message.content or message.refusal or message.content
    if content is None and message.audio is not None:
        content = transcript(message.audio.id)
        if content is None:
            place = f"{where}.audio.id"
            said = f"{place} names audio that expired or never existed. Send its text."
            raise ApiError(400, said, "audio_not_found", place)
    if message.tool_calls and message.role == "assistant":
        calls = [(call, call.function) for call in message.tool_calls]
        made["tool_calls"] = [
            {"id": c.id, "type": c.type, "function": {"name": f.name, "arguments": f.arguments}}
            for c, f in calls
        ]
    elif content is None:
        raise wrong_value(f"{where}.content: the message has no content.", f"{where}.content")
    if isinstance(content, str) or content is None:
        return {**made, "content": content or ""}
    items = [_item(part, f"{where}.content[{i}]", read_media) for i, part in enumerate(content)]
    if message.role == "user":
        return {**made, "content": items}
    for i, item in enumerate(items):
        if item["type"] != "text":
            place = f"{where}.content[{i}]"
            raise wrong_value(
                f"{place} is {item['type']}, which only user messages may have. Send it in "
                f"one, after this message of role {message.role}.",
                place,
            )
    return {**made, "content": "".join(item["text"] for item in items)}


def _check_message(message: Message, where: str) -> None:
    """Refuse a message's unknown fields, except in a reply that is sent back."""
    name = ""
    if message.role != "assistant":
        found = [n for n in ("refusal", "tool_calls", "audio") if getattr(message, n)]
        name, why = found[0] if found else "", "only messages of role assistant have it"
    elif message.content and message.refusal:
        name, why = "refusal", "the message also has content. Give one of them"
    elif (message.model_extra or {}).get("function_call") is not None:
        name, why = "function_call", "tool_calls has replaced it. Send the call there"
    if name:
        raise wrong_value(f"{where}.{name}: {why}.", f"{where}.{name}")


def _item(part: MessagePart, where: str, read_media: ReadMedia) -> Json:
    if isinstance(part, Text | RefusalPart):
        return {"type": "text", "text": part.text if isinstance(part, Text) else part.refusal}
    return read_media(part.model_dump(), where)
