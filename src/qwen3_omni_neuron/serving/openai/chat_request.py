"""Body of a chat request: its fields, and the messages and options that they become."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qwen3_omni_neuron.options import REQUEST_OPTIONS
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.endpoints.sound import SOUND_FORMATS, STREAMED_FORMATS
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    LenientObject,
    Seed,
    StrictObject,
    bounded_options,
    seed_of,
    unknown_field,
    wrong_value,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.openapi import schema_of_option
from qwen3_omni_neuron.serving.openai.vllm_omni import VLLM_OMNI_FIELDS, vllm_omni_options
from qwen3_omni_neuron.serving.openai.voices import VoiceName, Voices
from qwen3_omni_neuron.serving.openai.without_effect import CHAT, FIELDS
from qwen3_omni_neuron.serving.settings import ServerSettings
from qwen3_omni_neuron.serving.stored.replies import SpokenReplies

# Fields that a client may send beside OpenAI's: the options of a request, except those that have an
# OpenAI field and those that the server itself sets.
CHAT_OPTIONS = frozenset(option.name for option in REQUEST_OPTIONS) - {
    *("seed", "stop", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "literal_text"),
    "top_logprobs",
    "owner",
}
# OpenAI's fields that have no effect here, whatever their value.
_WITHOUT_EFFECT = frozenset(FIELDS[CHAT]) - {"model"}
# OpenAI's fields that are accepted with these values alone.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}

FURTHER_FIELDS: Mapping[str, Any] = {
    **{o.name: schema_of_option(o) for o in REQUEST_OPTIONS if o.name in CHAT_OPTIONS},
    **{name: {"description": "has no effect"} for name in sorted(_WITHOUT_EFFECT)},
    **{name: {"enum": [*values, None]} for name, values in _ONLY.items()},
    **{name: {"description": "as vllm-omni's clients send it"} for name in VLLM_OMNI_FIELDS},
}
"""Schemas of the fields that a request may have beside those of `ChatRequest`."""


class TextPart(LenientObject):
    """Text of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(LenientObject):
    """Text of an assistant's message that refused an answer."""

    type: Literal["refusal"]
    refusal: str


class SoundData(LenientObject):
    """A sound file in base64; its format is found in its content."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "webm", "mp4", "m4a"] | None = None


class InputAudioPart(LenientObject):
    """Sound, as OpenAI's clients send it."""

    type: Literal["input_audio"]
    input_audio: SoundData


class MediaUrl(LenientObject):
    """A data URL, or one of a host that the server was told."""

    url: str


class AudioUrlPart(LenientObject):
    """Sound by its URL."""

    type: Literal["audio_url"]
    audio_url: MediaUrl


class ImageUrlPart(LenientObject):
    """An image by its URL."""

    type: Literal["image_url"]
    image_url: MediaUrl


class VideoUrlPart(LenientObject):
    """A video by its URL."""

    type: Literal["video_url"]
    video_url: MediaUrl


MessagePart = Annotated[
    TextPart | RefusalPart | InputAudioPart | AudioUrlPart | ImageUrlPart | VideoUrlPart,
    Field(discriminator="type"),
]


class EarlierAudio(LenientObject):
    """Id of the speech of an earlier reply."""

    id: str


class CalledFunction(LenientObject):
    """Name of a function and its arguments, in JSON."""

    name: str
    arguments: str


class ToolCall(LenientObject):
    """Call of a tool in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(LenientObject):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    audio: EarlierAudio | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None


class Function(LenientObject):
    """Description of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(LenientObject):
    """A tool that the reply may call."""

    type: Literal["function"]
    function: Function


class FunctionName(LenientObject):
    """Name of a function."""

    name: str


class NamedTool(LenientObject):
    """The function that the reply must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedNames(LenientObject):
    """The functions that the reply may call, or must call one of."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(LenientObject):
    """Some of the tools: the others are shown to the model, and not called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


ToolChoice = Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


class TextFormat(StrictObject):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictObject):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictObject):
    """A JSON schema by its name."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictObject):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class AudioOutput(StrictObject):
    """Voice and format of the speech."""

    voice: VoiceName | None = None
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] = "wav"


class StreamOptions(LenientObject):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """Body of POST /v1/chat/completions.

    Further fields are options of a request (`options.RequestArguments`), or those of OpenAI's that
    only some values are taken of.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOutput | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    stop: str | list[str] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def speaks(self) -> bool:
        """True where the answer has speech."""
        return "audio" in (self.modalities or ())

    @property
    def in_vllm_omnis_way(self) -> bool:
        """True where the client requests speech as vllm-omni's clients do, without `audio`."""
        return self.speaks and self.audio is None

    @property
    def sound_format(self) -> str:
        """Format of the speech."""
        return "wav" if self.audio is None else self.audio.format


def check_request(wanted: ChatRequest) -> None:
    """Refuse unsupported fields and combinations. Raises ApiError."""
    if wanted.modalities == []:
        raise wrong_value("modalities is empty. Give text, or text and audio.", "modalities")
    if wanted.stream and wanted.speaks and wanted.sound_format not in STREAMED_FORMATS:
        raise wrong_value(
            f"audio of format {wanted.sound_format} can't be streamed. Take "
            f"{' or '.join(STREAMED_FORMATS)}, or stream: false for {', '.join(SOUND_FORMATS)}.",
            "audio.format",
        )
    for name, value in (wanted.model_extra or {}).items():
        if name in CHAT_OPTIONS or name in _WITHOUT_EFFECT or value is None:
            continue
        if name in VLLM_OMNI_FIELDS:
            continue
        if name not in _ONLY:
            raise unknown_field(name, CHAT_OPTIONS)
        if value not in _ONLY[name]:
            allowed = " or ".join(map(str, _ONLY[name]))
            raise wrong_value(f"{name} can only be {allowed} here. Leave it out.", name)


def request_options(
    wanted: ChatRequest, settings: ServerSettings, owner: str, voices: Voices
) -> dict[str, Any]:
    """Return the Python API's options for a request's fields. Raises ApiError."""
    extra = wanted.model_extra or {}
    options = vllm_omni_options(extra)
    options |= {name: extra[name] for name in CHAT_OPTIONS & extra.keys()}
    options = bounded_options(options, settings, owner) | {"literal_text": True}
    if wanted.audio is not None and wanted.audio.voice is not None:
        options["speaker"] = voices.speaker(wanted.audio.voice, "audio.voice")
    if wanted.seed is not None:
        options["seed"] = seed_of(wanted.seed)
    if wanted.temperature is not None:
        options["thinker_do_sample"] = wanted.temperature > 0
        if wanted.temperature > 0:
            options["thinker_temperature"] = max(wanted.temperature, 1e-6)
    if wanted.top_p is not None:
        options["thinker_top_p"] = max(wanted.top_p, 1e-6)
    most = wanted.max_completion_tokens or wanted.max_tokens
    if most is not None:
        options["thinker_max_new_tokens"] = most
    if wanted.stop:
        options["stop"] = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
    if wanted.tools and wanted.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in wanted.tools]
    choice = wanted.tool_choice
    if choice not in (None, "none"):
        options["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
    if wanted.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = wanted.parallel_tool_calls
    grammar = _grammar(wanted)
    if grammar is not None:
        if "grammar" in options:
            raise wrong_value("give response_format or grammar, not both.", "response_format")
        options["grammar"] = grammar
    return options


def _grammar(wanted: ChatRequest) -> dict[str, Any] | None:
    """Return the grammar of the request's format, None for text. Raises ApiError."""
    form = wanted.response_format
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema_
        strict = form.json_schema.strict is True
        return {"json": {"type": "object"} if schema is None else schema, "strict": strict}
    if not isinstance(form, JsonObjectFormat):
        return None
    if not any("json" in text.lower() for text in _written(wanted.messages)):
        raise wrong_value(
            "response_format is json_object, and no message has the word JSON. Ask for JSON in a "
            "message too, or take json_schema.",
            "response_format",
        )
    return {"json": {"type": "object"}}


def _written(messages: list[Message]) -> Iterator[str]:
    """Yield the texts of messages."""
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, TextPart):
                yield part.text


def conversation(
    wanted: ChatRequest, media: MediaReader, replies: SpokenReplies, owner: str
) -> list[dict[str, Any]]:
    """Return the messages for the model, and read their media. Raises ApiError."""
    return [
        _message(message, f"messages[{i}]", media, replies, owner)
        for i, message in enumerate(wanted.messages)
    ]


def _message(
    message: Message, where: str, media: MediaReader, replies: SpokenReplies, owner: str
) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role}
    content = message.content
    if content is None and message.audio is not None:
        if role != "assistant":
            raise wrong_value(
                f"{where} has audio of an earlier reply, and is of role {role}.", "messages"
            )
        content = replies.transcript(message.audio.id, owner)
        if content is None:
            raise ApiError(
                400,
                f"{where} names audio that has expired or never was. Send the reply's text.",
                "audio_not_found",
                "messages",
            )
    if message.tool_calls and role == "assistant":
        calls = [call.model_dump(include={"type", "function"}) for call in message.tool_calls]
        made["tool_calls"] = calls
    elif content is None:
        raise wrong_value(f"{where} has no content.", "messages")
    if isinstance(content, str) or content is None:
        return {**made, "content": content or ""}
    items = [_item(part, f"{where}.content[{i}]", media) for i, part in enumerate(content)]
    if role != "user" and all(item["type"] == "text" for item in items):
        return {**made, "content": "".join(item["text"] for item in items)}
    return {**made, "content": items}


def _item(part: MessagePart, where: str, media: MediaReader) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    return media.read(part.model_dump(), where)
