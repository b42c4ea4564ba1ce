"""Fields of a body as options of a request: voices, seeds, the fields of engines, limits."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from qwen3_omni_neuron.errors import OptionError, did_you_mean, format_value
from qwen3_omni_neuron.options import REQUEST_OPTIONS, Option, RequestOptions
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.serving.openai.fields import HONOURED_AS, REFUSED
from qwen3_omni_neuron.serving.openai.openapi import schema_of_option
from qwen3_omni_neuron.serving.settings import ServerSettings

LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED)]
"""OpenAI's seed; `seed_of` makes it one of this API."""
_OPTION: Mapping[str, Option] = {option.name: option for option in REQUEST_OPTIONS}
_TEMPLATE, _THINKS = "chat_template_kwargs", "enable_thinking"
ENGINE_FIELDS: Mapping[str, Any] = {
    **{name: schema_of_option(_OPTION[option]) for name, option in HONOURED_AS.items()},
    **{name: {"enum": [value, None]} for name, (value, _) in REFUSED.items()},
    _TEMPLATE: {"type": "object", "description": f"{_THINKS}, as the checkpoint has it"},
    _THINKS: {"type": "boolean", "description": "as the checkpoint has it"},
}
"""Schemas of the fields of engines, by name."""
OTHER_VOICES: Mapping[str, str] = {
    **dict.fromkeys(("alloy", "coral", "marin", "nova", "sage", "shimmer"), "Chelsie"),
    **dict.fromkeys(("ash", "cedar", "onyx"), "Ethan"),
    **dict.fromkeys(("ballad", "echo", "fable", "verse"), "Aiden"),
    **dict.fromkeys(("cherry", "serena", "tina"), "Chelsie"),
}
"""OpenAI's voices and DashScope's, and the released checkpoint's voices that speak for them."""


def _name(given: Any) -> Any:
    """Return the name in a voice object, and anything else unchanged."""
    return given["id"] if isinstance(given, Mapping) and set(given) == {"id"} else given


VoiceName = Annotated[str, BeforeValidator(_name, json_schema_input_type=str | dict[str, str])]
"""Field with a voice's name, which clients may send as an object with an id, too."""


class Voices:
    """Names of a model's voices. A checkpoint without a talker has none, and only writes text."""

    def __init__(self, names: tuple[str, ...], aliases: Sequence[str] = ()):
        """aliases: NAME=VOICE, which precede OTHER_VOICES, as ServerSettings has them.

        Raises OptionError if one of them is for a voice that the model does not have.
        """
        self.names = names
        self._own = {name.lower(): name for name in names}
        self._aliases = {
            name: self._own.get(voice.lower(), names[0])
            for name, voice in OTHER_VOICES.items()
            if names
        }
        for alias in aliases if names else ():
            name, _, voice = alias.partition("=")
            if voice.lower() not in self._own:
                raise OptionError(
                    f"the voice alias {alias!r} is for a voice {voice!r}, which this checkpoint "
                    f"does not have. It has {', '.join(names)}."
                )
            self._aliases[name.lower()] = self._own[voice.lower()]

    @property
    def default(self) -> str | None:
        """The default voice."""
        return self.names[0] if self.names else None

    def speaker(self, voice: str, param: str) -> str:
        """Return the name of the checkpoint's voice that speaks. param: the request's field.

        Raises ApiError for an unknown voice.
        """
        found = self._own.get(voice.lower()) or self._aliases.get(voice.lower())
        if found is None:
            known = ", ".join(self.names) or "none"
            hint = did_you_mean(voice.capitalize(), self.names)
            hint = hint or did_you_mean(voice.lower(), self._aliases)
            message = f"there is no voice {voice[:80]!r}.{hint} There are: {known}."
            raise wrong_value(message, param)
        return found


def seed_of(given: Any) -> Any:
    """Return the seed of this API for OpenAI's, which may be negative. Others are unchanged."""
    if isinstance(given, int) and -LARGEST_SEED - 1 <= given < 0:
        return given + LARGEST_SEED + 1
    return given


def engine_options(given: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Return the options of a request for the fields of engines. Raises ApiError.

    given: further fields of a body; others are ignored. thinks: whether the checkpoint's template
    lets a reply begin with reasoning.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in HONOURED_AS:
            options[HONOURED_AS[name]] = _option(name, value, given)
        elif name in REFUSED:
            check_only(name, value, *REFUSED[name])
        elif name in (_TEMPLATE, _THINKS):  # the latter in DashScope's requests
            asked = value if name == _TEMPLATE else {_THINKS: value}
            if not isinstance(asked, Mapping) or set(asked) - {_THINKS}:
                raise wrong_value(f"{_TEMPLATE} can only have {_THINKS} here.", _TEMPLATE)
            wanted = asked.get(_THINKS)
            if wanted is not None and wanted is not thinks:
                place = name if name == _THINKS else f"{_TEMPLATE}.{_THINKS}"
                does = "always" if thinks else "never"
                raise wrong_value(f"{place}: this checkpoint {does} thinks. Leave it out.", place)
    return options


def check_only(name: str, value: Any, only: Any, instead: str) -> None:
    """Refuse any but the value of a field that changes nothing. Raises ApiError."""
    # A number may be written as 1 or 1.0.
    if value != only or isinstance(value, bool) != isinstance(only, bool):
        advice = f"Use {instead}" if instead else "Leave it out"
        raise wrong_value(f"{name} can only be {format_value(only)} here. {advice}.", name)


def _option(name: str, value: Any, given: Mapping[str, Any]) -> Any:
    option = _OPTION[HONOURED_AS[name]]
    value = 0 if name == "top_k" and value == -1 else value  # -1 is "all" for these engines
    values, own = option.values, given.get(option.name)
    assert values is not None
    if not values.accepts(value):
        raise wrong_value(f"{name} must be {values.phrase}, got {format_value(value)}.", name)
    if own is not None and own != value:
        raise wrong_value(f"{name} and {option.name} are the same. Give one of them.", name)
    return value


def check_lengths(options: Mapping[str, Any]) -> None:
    """Refuse lengths that contradict other options of a request, by their fields. Raises ApiError.

    The API would name its own options.
    """
    least = options.get("thinker_min_new_tokens", 0)
    most = options.get("thinker_max_new_tokens", RequestOptions.thinker_max_new_tokens)
    # Options of vllm-omni's lists are not checked yet: the API refuses those of another type.
    if all(isinstance(one, int | float) for one in (least, most)) and least > most:
        message = f"min_tokens is {least}, more than the limit of the text, {most}. Lower it."
        raise wrong_value(message, "min_tokens")
    name = "min_tokens" if least else "ignore_eos"
    if (least or options.get("ignore_eos")) and has_grammar(options):
        message = f"{name} can't be given with tools, response_format or a grammar. Leave it out."
        raise wrong_value(message, name)


def has_grammar(options: Mapping[str, Any]) -> bool:
    """Return whether a reply with these options may have a grammar to compile."""
    return any(options.get(name) for name in ("tools", "tool_choice", "grammar"))


def joined_options(own: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by their own names and by other fields. Raises ApiError for two values."""
    for name, value in others.items():
        if own.get(name, value) != value:
            message = f"{name} is {format_value(own[name])}, and another field of the request makes"
            raise wrong_value(f"{message} it {format_value(value)}. Give one of them.", name)
    return {**own, **others}


def bounded_options(
    given: Mapping[str, Any], settings: ServerSettings, owner: str
) -> dict[str, Any]:
    """Return a request's options, limited to the server's deadlines and the owner's KV rows."""
    options = {**given, "owner": owner}
    if "seed" in options:
        options["seed"] = seed_of(options["seed"])
    for name in ("first_token_timeout_s", "wait_timeout_s"):
        seconds = options.get(name)
        if isinstance(seconds, int | float):
            options[name] = min(seconds, settings.request_timeout_s)
    # KV rows are not shared between keys: a fast first token would reveal what others have asked.
    cache_key = options.get("cache_key")
    if settings.api_keys and (cache_key is None or isinstance(cache_key, str)):
        options["cache_key"] = f"{owner} {cache_key or ''}"
    return options
