"""Configuration of a session or one response, as clients send and see it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.options import REQUEST_OPTIONS, RequestOptions
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ClientObject,
    OneOf,
    is_model,
    unknown_field,
)
from qwen3_omni_neuron.serving.openai.chat_request import CHAT_OPTIONS, function_tools
from qwen3_omni_neuron.serving.openai.errors import UNKNOWN, ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import VoiceName, Voices, seed_of
from qwen3_omni_neuron.serving.openai.responses import FlatNamedTool, Metadata
from qwen3_omni_neuron.serving.realtime.events import Json, wrong_field
from qwen3_omni_neuron.serving.realtime.turn_detector import INSTALL, TurnSettings, can_detect

# Request options beside OpenAI's fields; sessions lack videos' sound.
_OPTIONS = {
    option.name: option
    for option in REQUEST_OPTIONS
    if option.name in {*CHAT_OPTIONS, "seed"} - {"use_audio_in_video"}
}
# Silence that ends an incomplete or unjudged turn, by semantic_vad's eagerness.
_LONGEST_MS = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}
_SILENCE_MS = {"low": 1000, "medium": 500, "auto": 500, "high": 300}
SessionType = Literal["realtime", "transcription"]
_TRANSCRIBING = ("type", "audio", "include")  # fields of a session that only transcribes
MOST_NAMED = 8  # MCP servers named in an error
_NESTED = ("audio", "input", "output")
Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)]
MostTokens = Annotated[
    Annotated[int, Field(ge=1, le=4096)] | Literal["inf"], OneOf("an integer from 1 to 4096 or inf")
]


class SoundFormat(ClientObject):
    """Format of sound on the socket. rate: sample rate in Hz, for PCM only."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Literal[16000, 24000] | None = 24000


class ServerVad(ClientObject):
    """Turn detection by the server. Times in ms."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=32, le=10_000)] = 500
    idle_timeout_ms: Annotated[int, Field(ge=1000, le=60_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def turns(self) -> TurnSettings:
        """Settings of the turn detector."""
        own = {"type", "create_response", "interrupt_response"}
        return TurnSettings(**self.model_dump(exclude=own))


class SemanticVad(ClientObject):
    """Turn detection by the server, with Smart Turn's model judging pauses."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def turns(self) -> TurnSettings:
        """Settings of the turn detector."""
        return TurnSettings(silence_duration_ms=_LONGEST_MS[self.eagerness], by_meaning=True)

    @property
    def by_silence(self) -> ServerVad:
        """The detection by silence that replaces this one."""
        same = self.model_dump(include={"create_response", "interrupt_response"})
        silence_ms = _SILENCE_MS[self.eagerness]
        return ServerVad(type="server_vad", silence_duration_ms=silence_ms, **same)


class TranscriptionConfig(ClientObject):
    """Transcription of the user's speech by the answering model; fields have no effect."""

    model: str | None = None
    language: str | None = None
    languages: list[str] | None = None
    keywords: list[str] | None = None
    prompt: str | None = None
    delay: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None


class NoiseReduction(ClientObject):
    """Noise reduction, without effect."""

    type: Literal["near_field", "far_field"] | None = None
    strength: Annotated[float, Field(ge=0, le=1)] | None = None


class StoredPrompt(ClientObject):
    """A prompt stored at OpenAI, without effect."""

    id: str
    version: str | None = None
    variables: dict[str, Any] | None = None


class AudioInput(ClientObject):
    """Sound of the user."""

    format: SoundFormat = SoundFormat()
    noise_reduction: NoiseReduction | None = None
    transcription: TranscriptionConfig | None = None
    turn_detection: Annotated[ServerVad | SemanticVad, OneOf()] | None = None


class SessionAudioOutput(ClientObject):
    """Sound of the reply. speed: above 1 is faster, at the same pitch."""

    format: SoundFormat = SoundFormat()
    voice: VoiceName | None = None
    speed: Annotated[float, Field(ge=0.25, le=1.5)] = 1.0


class SessionAudio(ClientObject):
    """Sound in both directions."""

    input: AudioInput = AudioInput()
    output: SessionAudioOutput = SessionAudioOutput()


class FunctionTool(ClientObject):
    """Function that a reply may call."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CommonConfig(BaseModel):
    """Common fields of a session and a response. Further fields are options of a request."""

    model_config = ConfigDict(strict=True, extra="allow")

    instructions: str | None = None
    output_modalities: Modalities | None = None
    max_output_tokens: MostTokens | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: (
        Annotated[
            Literal["auto", "none", "required"] | FlatNamedTool,
            OneOf("auto, none, required or a function by its name"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    prompt: StoredPrompt | None = None
    reasoning: Any = None


class SessionConfig(_CommonConfig):
    """Configuration of a session; type transcription has only _TRANSCRIBING's fields."""

    type: SessionType = "realtime"
    model: str
    audio: SessionAudio = SessionAudio()
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None
    tracing: Any = None
    truncation: Annotated[
        str | dict[str, Any], OneOf("auto, disabled or an object of type retention_ratio")
    ] = "auto"

    @property
    def answers(self) -> bool:
        """False if the session only transcribes."""
        return self.type == "realtime"


class ResponseAudioOutput(ClientObject):
    """Sound of one response, in the session's format."""

    format: SoundFormat | None = None
    voice: VoiceName | None = None


class ResponseAudio(ClientObject):
    """Sound of one response."""

    output: ResponseAudioOutput = ResponseAudioOutput()


class ResponseConfig(_CommonConfig):
    """Configuration of one response, which overrides the session configuration."""

    audio: ResponseAudio = ResponseAudio()
    conversation: Literal["auto", "none"] = "auto"
    input: list[Any] | None = Field(None, max_length=MOST_MESSAGES)
    metadata: Metadata | None = None


def speaks(config: _CommonConfig) -> bool:
    """Return whether sound is requested."""
    return config.output_modalities == ["audio"]


def check_speech(config: _CommonConfig, voices: Voices, where: str) -> None:
    """Raise ApiError if speech is requested of a model without voices."""
    if speaks(config) and not voices.names:
        raise ApiError(
            400,
            'this checkpoint has no talker: it can write text, not speak. Use ["text"].',
            "no_speech",
            f"{where}.output_modalities",
        )


def first_config(model: str, voices: Voices, kind: SessionType = "realtime") -> SessionConfig:
    """Return a session's initial configuration. kind: its type."""
    return SessionConfig(
        type=kind,
        model=model,
        instructions="",
        output_modalities=["audio" if voices.names else "text"],
        max_output_tokens="inf",
        tools=[],
        tool_choice="auto",
        audio=SessionAudio(
            input=AudioInput(
                turn_detection=ServerVad(type="server_vad") if can_detect() else None,
                transcription=TranscriptionConfig() if kind == "transcription" else None,
            ),
            output=SessionAudioOutput(voice=voices.default),
        ),
    )


def without_mcp(given: Json) -> tuple[Json, ApiError | None]:
    """Return a client's fields without tools of type mcp, and the error for these."""
    tools = given.get("tools")
    tools = tools if isinstance(tools, list) else []
    remote = [tool for tool in tools if isinstance(tool, Mapping) and tool.get("type") == "mcp"]
    if not remote:
        return given, None
    labels = ", ".join(repr(str(tool.get("server_label"))[:80]) for tool in remote[:MOST_NAMED])
    message = (
        f"{len(remote)} tools are of type mcp ({labels}): this server calls no other servers. The "
        "rest of the session was updated. Use tools of type function, which the client calls."
    )
    left = [tool for tool in tools if not any(tool is other for other in remote)]
    return {**given, "tools": left}, ApiError(400, message, "unsupported", "session.tools")


def updated(
    config: SessionConfig, given: Mapping[str, Any], voices: Voices, by_meaning: bool = False
) -> SessionConfig:
    """Return a configuration updated by a client's fields. Raises ApiError.

    by_meaning: a turn's end may be judged by meaning; else server_vad replaces that.
    """
    if given.get("type", config.type) == "transcription":
        _check_transcribing(given)
    try:
        new = SessionConfig.model_validate(merged(config.model_dump(), given))
    except ValidationError as error:
        raise wrong_field(error, "session") from error
    if not is_model(new.model, config.model):
        message = f"the session's model is {config.model!r} and can't be changed."
        raise wrong_value(message, "session.model")
    new.model = config.model
    heard, output = new.audio.input, new.audio.output
    if not new.answers and heard.transcription is None:
        heard.transcription = TranscriptionConfig()
    detection = heard.turn_detection
    if detection is not None and not can_detect():
        message = f"{detection.type} needs packages that are not installed: {INSTALL}."
        raise ApiError(400, message, "not_installed", "session.audio.input.turn_detection")
    if isinstance(detection, SemanticVad) and not by_meaning:
        heard.turn_detection = detection.by_silence
    check_speech(new, voices, "session")
    if output.voice is None:
        output.voice = voices.default
    else:
        output.voice = voices.speaker(output.voice, "session.audio.output.voice")
    _check_options(new, "session")
    return new


def _check_transcribing(given: Mapping[str, Any]) -> None:
    audio = given.get("audio")
    inner = audio if isinstance(audio, Mapping) else {}
    wrong = [f"session.{name}" for name in given if name not in _TRANSCRIBING]
    wrong += [f"session.audio.{name}" for name in inner if name != "input"]
    if wrong:
        path = wrong[0][:80]
        message = "a session of type transcription has only type, audio.input and include."
        message = f"{path}: {message}"
        raise ApiError(400, message, UNKNOWN, path)


def response_config(
    given: Json | None, voices: Voices, session: SoundFormat | None = None
) -> ResponseConfig:
    """Parse a client's configuration of one response. Raises ApiError.

    session: format of the session's sound, also required of the response.
    """
    try:
        config = ResponseConfig.model_validate(given or {})
    except ValidationError as error:
        raise wrong_field(error, "response") from error
    check_speech(config, voices, "response")
    output = config.audio.output
    if output.voice is not None:
        output.voice = voices.speaker(output.voice, "response.audio.output.voice")
    if session is not None and output.format is not None:
        asked = output.format.model_dump(exclude_unset=True)
        if asked != session.model_dump(include=set(asked)):
            raise wrong_value(
                f"a response's sound must have the session's format: type {session.type}, rate "
                f"{session.rate}. Change it by session.update.",
                "response.audio.output.format",
            )
    _check_options(config, "response")
    return config


def options_of(*configs: SessionConfig | ResponseConfig) -> dict[str, Any]:
    """Return the Python API's options; the last configuration takes precedence."""
    options: dict[str, Any] = {}
    tools: list[FunctionTool] = []
    choice: str | FlatNamedTool = "auto"
    for config in configs:
        if config.max_output_tokens == "inf":
            options["thinker_max_new_tokens"] = RequestOptions.thinker_max_new_tokens
        elif config.max_output_tokens is not None:
            options["thinker_max_new_tokens"] = config.max_output_tokens
        if isinstance(config, SessionConfig):
            options["truncation"] = config.truncation
        options |= config.model_extra or {}
        tools = tools if config.tools is None else config.tools
        choice = config.tool_choice or choice
        if config.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = config.parallel_tool_calls
        if config.audio.output.voice is not None:
            options["speaker"] = config.audio.output.voice
    if isinstance(choice, FlatNamedTool):
        options["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice == "required":
        options["tool_choice"] = choice
    return {**options, "tools": function_tools([] if choice == "none" else tools)}


def shown(config: SessionConfig) -> Json:
    """Return a configuration as clients see it."""
    made = config.model_dump()
    if not config.answers:
        made = {name: made[name] for name in _TRANSCRIBING}
        del made["audio"]["output"]
    for side in made["audio"]:
        form = made["audio"][side]["format"]
        if form["type"] != "audio/pcm":
            del form["rate"]
    return made


def _check_options(config: _CommonConfig, where: str) -> None:
    given = dict(config.model_extra or {})
    if isinstance(config, SessionConfig):
        given["truncation"] = config.truncation
    for name, value in given.items():
        if name not in _OPTIONS:
            message = f"{name[:80]}: {unknown_field(config, name, _OPTIONS)} See docs/realtime.md."
            raise ApiError(400, message, UNKNOWN, f"{where}.{name[:80]}")
        try:
            _OPTIONS[name].check(seed_of(value) if name == "seed" else value)
        except OptionError as error:
            raise wrong_value(str(error), f"{where}.{name}") from error


def merged(now: Json, given: Mapping[str, Any]) -> Json:
    """Return a configuration's fields updated by client fields."""
    made = dict(now)
    for name, value in given.items():
        if value is None and name in _OPTIONS:  # back to the default
            made.pop(name, None)
            continue
        nested = name in _NESTED and isinstance(value, Mapping) and isinstance(now.get(name), dict)
        made[name] = merged(now[name], value) if nested else value
    return made
