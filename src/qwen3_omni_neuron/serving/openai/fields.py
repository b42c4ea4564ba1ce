"""Fields that clients send beside a body's own, and as request options.

One table for all endpoints: each field is an option, has no effect, or is refused except for null
and a value without effect. docs/serving.md shows it.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from qwen3_omni_neuron.errors import OptionError, did_you_mean, format_value
from qwen3_omni_neuron.options import REQUEST_OPTIONS, Option, RequestOptions
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.serving.openai.openapi import schema_of_option, schemas_of_options
from qwen3_omni_neuron.serving.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
RESPONSE = f"{RESPONSES}/{{response_id}}"
INPUT_ITEMS = f"{RESPONSE}/input_items"
SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
REALTIME, ITEM = "/v1/realtime", "conversation.item.create"  # the socket, and an event of it
LOGPROBS = "message.output_text.logprobs"
"""Log-probabilities that a response may include."""

HONOURED_AS: Mapping[str, str] = {
    "top_k": "thinker_top_k",
    "min_p": "thinker_min_p",
    "repetition_penalty": "thinker_repetition_penalty",
    "presence_penalty": "thinker_presence_penalty",
    "frequency_penalty": "thinker_frequency_penalty",
    "min_tokens": "thinker_min_new_tokens",
    "ignore_eos": "ignore_eos",
}
"""Options of a request by the names of vLLM and SGLang."""

REFUSED: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("n", "best_of"), (1, "several requests")),
    **dict.fromkeys(("use_beam_search", "watermarking"), (False, "")),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True, "")),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True, "")),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), (False, "")),
    "echo": (False, COMPLETIONS),
    "length_penalty": (1, ""),
    "logit_bias": ({}, ""),
    "stop_token_ids": ([], "thinker_eos_token_id, with all tokens that end the text"),
    "suffix": ("", ""),
    "add_generation_prompt": (True, ""),
    "continue_final_message": (False, COMPLETIONS),
    "priority": (0, ""),
    **{"functions": ([], "tools"), "function_call": (None, "tool_choice")},
}
"""Fields of these engines and of chat: their only value, and what to use instead."""

GRAMMAR_FIELDS: Mapping[str, str] = {
    **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"},
    **{"guided_grammar": "lark", "regex": "regex", "ebnf": "lark", "json_schema": "json"},
}
"""Grammar fields of vLLM and SGLang, and their kinds."""
STRUCTURED = "structured_outputs"
STRUCTURED_FIELDS: Mapping[str, str] = {
    **{"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"},
    "json_object": "json_object",
}
"""Fields in vLLM's object of that name."""

REFUSED_IN_COMPLETIONS: Mapping[str, tuple[Any, str]] = dict.fromkeys(
    (*GRAMMAR_FIELDS, STRUCTURED), (None, f"them, or response_format, in {CHAT}")
)

REFUSED_IN_RESPONSES: Mapping[str, tuple[Any, str]] = {
    "background": (False, "stream: true"),
    "conversation": (None, "previous_response_id"),
    "prompt": (None, "input"),
    "context_management": ([], "truncation: auto"),
    "logprobs": (False, f"include: [{LOGPROBS}]"),
    "messages": (None, f"input, or {CHAT}"),
    "response_format": (None, "text.format"),
    "modalities": (["text"], f"{CHAT}, which speaks"),
    "audio": (None, f"{CHAT}, which speaks"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (None, "max_output_tokens")),
}

_CONVERSATION = (
    "model user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "service_tier"
)
_ENGINES = "request_id rid return_stage_metrics"
_CACHES = "cache_control prompt_cache_breakpoint"
_OF_STAGES = "detokenize stop_token_ids"
NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    CHAT: {
        "": f"{_CONVERSATION} metadata store prediction verbosity reasoning_effort {_ENGINES}",
        "stream_options": "include_obfuscation",
        "response_format.json_schema": "name description",
        **dict.fromkeys(("tools[]", "tools[].function"), "cache_control"),
        "messages[]": "name id index metadata cache_control *",
        "messages[].audio": "*",
        **dict.fromkeys(("messages[].tool_calls[]", "messages[].tool_calls[].function"), "*"),
        "messages[].content[]": f"id index uuid role annotations logprobs {_CACHES}",
        "messages[].content[].input_audio": "format",
        **{f"messages[].content[].{kind}_url": "format" for kind in ("audio", "image", "video")},
        "sampling_params_list[0]": _OF_STAGES,
        "sampling_params_list[1]": f"{_OF_STAGES} seed",
        "sampling_params_list[2]": f"{_OF_STAGES} seed temperature top_p top_k max_tokens "
        "repetition_penalty",
    },
    COMPLETIONS: {"": f"model user {_ENGINES}", "stream_options": "include_obfuscation"},
    RESPONSES: {
        "": f"{_CONVERSATION} reasoning include max_tool_calls moderation stream_options "
        f"client_metadata {_ENGINES}",
        "text": "verbosity",
        "text.format": "name description",
        "tools[]": "cache_control",
        "input[]": "id status phase caller name cache_control *",
        "input[].content[]": f"id index annotations logprobs {_CACHES}",
        "input[].output[]": _CACHES,
    },
    RESPONSE: {"": "include include_obfuscation starting_after"},
    INPUT_ITEMS: {"": "include"},
    SPEECH: {"": "model instructions language"},
    TRANSCRIPTIONS: {"": "model language languages keywords prompt"},
    REALTIME: {
        "": "model prompt reasoning tracing",
        "audio.input": "noise_reduction",
        "audio.input.transcription": "model language languages keywords prompt delay",
    },
    ITEM: {"": "object status *", "content[]": "id index format annotations logprobs"},
}
"""Names of fields without effect, by path or event, and by object.

[] stands after a list, [0] for its first item, and * for additional fields that clients send back.
"""
# Values that request nothing, beside null, empty values, and the server's model.
_NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("metadata", "store", "return_stage_metrics", "include_obfuscation"), False),
    **{"service_tier": "auto", "verbosity": "medium", "language": "unknown"},
    f"{SPEECH} language": "Auto",
    f"{RESPONSES} include": [LOGPROBS],
}


@cache
def names_in(path: str, where: str) -> frozenset[str]:
    """Return the names of fields without effect directly in an object, such as messages[].

    where: "" for the request or item itself.
    """
    return frozenset(NO_EFFECT[path].get(where, "").split())


def sent_without_effect(path: str, given: Any, model: str, where: str = "") -> Iterator[str]:
    """Yield the names of a client's fields without effect, once per occurrence.

    given: fields of its request or session, as a mapping or pydantic model. model: the server's,
    which requests nothing. where: name of the object or list.
    """
    if isinstance(given, list):
        for number, item in enumerate(given):
            place = f"{where}[{number}]"
            place = place if place in NO_EFFECT[path] else f"{where}[]"
            yield from sent_without_effect(path, item, model, place)
    if not isinstance(given, Mapping | BaseModel):
        return
    extra = (given.model_extra or {}) if isinstance(given, BaseModel) else {}
    fields = given if isinstance(given, Mapping) else {**given.__dict__, **extra}
    names, inner = names_in(path, where), _objects(path)
    for field, value in fields.items():
        name = f"{where}.{field}" if where else field
        if name in inner:
            yield from sent_without_effect(path, value, model, name)
        elif field in names or ("*" in names and field in extra):
            nothing = _NOTHING.get(f"{path} {field}", _NOTHING.get(field))
            nothing = model if field == "model" else nothing
            if value in (None, "", [], {}, nothing):
                continue
            yield name if field in names else name.removesuffix(field) + "*"


@cache
def _objects(path: str) -> frozenset[str]:
    found = set[str]()
    for where in NO_EFFECT[path]:
        parts = where.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            found |= {name, re.sub(r"\[\d*\]$", "", name)}
    return frozenset(found)


LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED)]
"""OpenAI's seed; see `seed_of`."""
_OPTION: Mapping[str, Option] = {option.name: option for option in REQUEST_OPTIONS}
_TEMPLATE, _THINKS = "chat_template_kwargs", "enable_thinking"
_THINKING = {"enabled": True, "disabled": False, "auto": None, None: None}


def _only(refused: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    values = {name: value for name, (value, _) in refused.items()}
    return {n: {"enum": [None] if v is None else [v, None]} for n, v in values.items()}


ENGINE_FIELDS: Mapping[str, Any] = {
    **{name: schema_of_option(_OPTION[option]) for name, option in HONOURED_AS.items()},
    **_only(REFUSED),
    **{name: {"description": f"a grammar: {kind}"} for name, kind in GRAMMAR_FIELDS.items()},
    STRUCTURED: {"type": "object", "description": f"a grammar: {', '.join(STRUCTURED_FIELDS)}"},
    _TEMPLATE: {"type": "object", "description": f"{_THINKS}, as the checkpoint has it"},
    _THINKS: {"type": "boolean", "description": "as the checkpoint has it"},
    "thinking": {"type": "object", "description": "type: as the checkpoint does, or auto"},
}
"""Schemas of engines' fields, by name."""


def further_fields(
    path: str, options: Collection[str], refused: Mapping[str, tuple[Any, str]]
) -> dict[str, Any]:
    """Return the schemas of a text body's additional fields, by name.

    path: the endpoint's. options: names of request options. refused: see `check_only`.
    """
    return {
        **schemas_of_options(options),
        **{name: {"description": "has no effect"} for name in sorted(names_in(path, ""))},
        **ENGINE_FIELDS,
        **_only(refused),
    }


OTHER_VOICES: Mapping[str, str] = {
    **dict.fromkeys(("alloy", "coral", "marin", "nova", "sage", "shimmer"), "Chelsie"),
    **dict.fromkeys(("ash", "cedar", "onyx"), "Ethan"),
    **dict.fromkeys(("ballad", "echo", "fable", "verse"), "Aiden"),
    **dict.fromkeys(("cherry", "serena", "tina"), "Chelsie"),
}
"""The released checkpoint's voices by OpenAI's and DashScope's."""


def _name(given: Any) -> Any:
    """Return the name in a voice object, or another value unchanged."""
    return given["id"] if isinstance(given, Mapping) and set(given) == {"id"} else given


VoiceName = Annotated[str, BeforeValidator(_name, json_schema_input_type=str | dict[str, str])]
"""Field with a voice's name, or an object with the name as its id."""


class Voices:
    """Names of a model's voices, none without a talker."""

    def __init__(self, names: tuple[str, ...], aliases: Sequence[str] = ()):
        """aliases: NAME=VOICE, which precede OTHER_VOICES, as in ServerSettings.

        Raises OptionError if the model lacks the voice.
        """
        self.names = names
        own = {name.lower(): name for name in names}
        self._speakers = {
            name: own.get(voice.lower(), names[0]) for name, voice in OTHER_VOICES.items() if names
        }
        for alias in aliases if names else ():
            name, voice = map(str.strip, alias.split("=", 1))
            if voice.lower() not in own:
                raise OptionError(
                    f"the voice alias {alias!r} is for a voice {voice!r}, which this checkpoint "
                    f"does not have. It has {', '.join(names)}."
                )
            self._speakers[name.lower()] = own[voice.lower()]
        self._speakers |= own

    @property
    def default(self) -> str | None:
        """The default voice: the default of `RequestOptions`, or else the first."""
        wanted = RequestOptions().speaker
        return wanted if wanted in self.names else next(iter(self.names), None)

    def speaker(self, voice: str, param: str) -> str:
        """Return the checkpoint's name of a voice. param: the request's field.

        Raises ApiError for an unknown voice.
        """
        found = self._speakers.get(voice.lower())
        if found is None:
            known = ", ".join(self.names) or "none"
            hint = did_you_mean(voice.capitalize(), self.names)
            hint = hint or did_you_mean(voice.lower(), self._speakers)
            message = f"unknown voice {voice[:80]!r}.{hint} Known: {known}."
            raise wrong_value(message, param)
        return found


def seed_of(given: Any) -> Any:
    """Return a non-negative seed for any of OpenAI's seeds; other values unchanged."""
    if isinstance(given, int) and -LARGEST_SEED - 1 <= given < 0:
        return given + LARGEST_SEED + 1
    return given


def engine_options(given: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Return the request options for engines' fields. Raises ApiError.

    given: additional fields of a body; others are ignored. thinks: replies may reason first.
    """
    check_only(given, REFUSED)
    asked = {name: given[name] for name in HONOURED_AS if given.get(name) is not None}
    options = {HONOURED_AS[name]: _option(name, value) for name, value in asked.items()}
    template = {} if given.get(_TEMPLATE) is None else given[_TEMPLATE]
    if not isinstance(template, Mapping) or set(template) - {_THINKS}:
        raise wrong_value(f"{_TEMPLATE} can only have {_THINKS} here.", _TEMPLATE)
    thinking = given.get("thinking") or {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    if kind not in _THINKING or (isinstance(thinking, Mapping) and set(thinking) - {"type"}):
        raise wrong_value("thinking can only have the type enabled, disabled or auto.", "thinking")
    asked_of = {
        _THINKS: given.get(_THINKS),  # DashScope's
        f"{_TEMPLATE}.{_THINKS}": template.get(_THINKS),
        "thinking.type": _THINKING[kind],
    }
    for place, value in asked_of.items():
        if value not in (None, thinks):
            does = "always" if thinks else "never"
            raise wrong_value(f"{place}: this checkpoint {does} thinks. Leave it out.", place)
    return options


def check_only(given: Mapping[str, Any], table: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse other values of fields that allow only one. Raises ApiError.

    table: that value, and what to use instead, by field.
    """
    for name, (only, instead) in table.items():
        value = given.get(name)
        # A number may be written as 1 or 1.0.
        if value is not None and (
            value != only or isinstance(value, bool) != isinstance(only, bool)
        ):
            advice = f"Use {instead}" if instead else "Leave it out"
            raise wrong_value(f"{name} can only be {format_value(only)} here. {advice}.", name)


def _option(name: str, value: Any) -> Any:
    value = 0 if name == "top_k" and value == -1 else value  # -1 is "all" for these engines
    values = _OPTION[HONOURED_AS[name]].values
    assert values is not None
    if not values.accepts(value):
        raise wrong_value(f"{name} must be {values.phrase}, got {format_value(value)}.", name)
    return value


def check_lengths(options: Mapping[str, Any]) -> None:
    """Refuse lengths that contradict other options. Raises ApiError."""
    least = options.get("thinker_min_new_tokens", 0)
    most = options.get("thinker_max_new_tokens", RequestOptions.thinker_max_new_tokens)
    # vllm-omni's lists are not yet checked: the API refuses wrong types.
    if all(isinstance(one, int | float) for one in (least, most)) and least > most:
        message = f"min_tokens is {least}, more than the limit of the text, {most}. Lower it."
        raise wrong_value(message, "min_tokens")
    name = "min_tokens" if least else "ignore_eos"
    if (least or options.get("ignore_eos")) and has_grammar(options):
        message = f"{name} can't be given with tools, response_format or a grammar. Leave it out."
        raise wrong_value(message, name)


def has_grammar(options: Mapping[str, Any]) -> bool:
    """Return whether these options may need a grammar."""
    return any(options.get(name) for name in ("tools", "tool_choice", "grammar"))


def bounded_options(
    given: Mapping[str, Any], settings: ServerSettings, owner: str
) -> dict[str, Any]:
    """Return options limited to the server's deadlines and the owner's KV rows."""
    options = {**given, "owner": owner}
    if "seed" in options:
        options["seed"] = seed_of(options["seed"])
    for name in ("first_token_timeout_s", "wait_timeout_s"):
        seconds = options.get(name)
        if isinstance(seconds, int | float):
            options[name] = min(seconds, settings.request_timeout_s)
    # Keys share no KV rows: a fast first token would reveal others' requests.
    cache_key = options.get("cache_key")
    if settings.api_keys and (cache_key is None or isinstance(cache_key, str)):
        options["cache_key"] = f"{owner} {cache_key or ''}"
    return options
