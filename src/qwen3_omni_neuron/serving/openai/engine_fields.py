"""Fields of engines such as vLLM and SGLang, which their clients send beside OpenAI's.

They are the same in chat, completions and responses: some are options of a request under another
name, some can only have the value that changes nothing, and null is such a value everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.errors import format_value
from qwen3_omni_neuron.options import REQUEST_OPTIONS, Option, RequestOptions
from qwen3_omni_neuron.serving.openai.bodies import has_grammar
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.openapi import schema_of_option

# Names of their fields, and the options of a request.
_OPTIONS = {
    "top_k": "thinker_top_k",
    "min_p": "thinker_min_p",
    "repetition_penalty": "thinker_repetition_penalty",
    "presence_penalty": "thinker_presence_penalty",
    "frequency_penalty": "thinker_frequency_penalty",
    "min_tokens": "thinker_min_new_tokens",
    "ignore_eos": "ignore_eos",
}
_OPTION: Mapping[str, Option] = {option.name: option for option in REQUEST_OPTIONS}


@dataclass(frozen=True)
class _Neutral:
    """A field that can only have a value that changes nothing. instead: what to do otherwise."""

    value: Any
    instead: str = "Leave it out."


_ONE_REPLY = "Send several requests."
_NEUTRAL: Mapping[str, _Neutral] = {
    "n": _Neutral(1, _ONE_REPLY),
    "best_of": _Neutral(1, _ONE_REPLY),
    "use_beam_search": _Neutral(False),
    "length_penalty": _Neutral(1),
    "logit_bias": _Neutral({}),
    "stop_token_ids": _Neutral([], "Give thinker_eos_token_id: all tokens that end the text."),
    "skip_special_tokens": _Neutral(True),
    "spaces_between_special_tokens": _Neutral(True),
    "include_stop_str_in_output": _Neutral(False, "Add the string yourself."),
    "no_stop_trim": _Neutral(False, "Add the stop string yourself."),
    "echo": _Neutral(False, "Put the prompt before the reply yourself."),
    "suffix": _Neutral("", "Put it into the prompt."),
    "add_generation_prompt": _Neutral(True),
    "continue_final_message": _Neutral(False, "Use /v1/completions, whose prompt is continued."),
    "include_reasoning": _Neutral(True),
    "separate_reasoning": _Neutral(True),
    "stream_reasoning": _Neutral(True),
    "watermarking": _Neutral(False),
    "priority": _Neutral(0),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"),
        _Neutral(None, "Give response_format or grammar to /v1/chat/completions."),
    ),
}
VLLM_OMNI_FIELDS = ("sampling_params_list", "mm_processor_kwargs")
"""Fields of vllm-omni's clients, which give the options of each stage in a list."""
# Names of its fields, and the options of a request. Its other fields have no effect here.
_VLLM_OMNI_THINKER = {
    "temperature": "thinker_temperature",
    "top_p": "thinker_top_p",
    "top_k": "thinker_top_k",
    "max_tokens": "thinker_max_new_tokens",
    "seed": "seed",
}
_VLLM_OMNI_TALKER = {
    "temperature": "talker_temperature",
    "top_p": "talker_top_p",
    "top_k": "talker_top_k",
    "max_tokens": "talker_max_new_tokens",
    "repetition_penalty": "talker_repetition_penalty",
}
_TEMPLATE, _THINKS = "chat_template_kwargs", "enable_thinking"
ENGINE_FIELDS: Mapping[str, Any] = {
    **{name: schema_of_option(_OPTION[option]) for name, option in _OPTIONS.items()},
    **{name: {"enum": [one.value, None]} for name, one in _NEUTRAL.items()},
    _TEMPLATE: {"type": "object", "description": f"{_THINKS}, as the checkpoint has it"},
    _THINKS: {"type": "boolean", "description": "as the checkpoint has it"},
}
"""Schemas of these fields, by name."""


def engine_options(given: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Return the options of a request for these fields, and refuse what they can't be.

    given: further fields of a body; others are ignored. thinks: whether the checkpoint's template
    lets a reply begin with reasoning. Raises ApiError.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name not in ENGINE_FIELDS:
            continue
        if name in _OPTIONS:
            options[_OPTIONS[name]] = _option(name, value, given)
        elif name == _TEMPLATE:
            _check_template(value, thinks)
        elif name == _THINKS:  # so in DashScope's requests
            _check_thinks(value, thinks, name)
        elif not _is_neutral(value, _NEUTRAL[name].value):
            raise _not_neutral(name)
    return options


def vllm_omni_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for vllm-omni's own fields. Raises ApiError."""
    stages = extra.get("sampling_params_list") or []
    processor = extra.get("mm_processor_kwargs") or {}
    if (
        not isinstance(stages, list)
        or not all(isinstance(stage, Mapping) for stage in stages)
        or not isinstance(processor, Mapping)
    ):
        raise wrong_value(
            "sampling_params_list is a list of objects, and mm_processor_kwargs an object.",
            "sampling_params_list",
        )
    options: dict[str, Any] = {}
    for stage, names in zip(stages, (_VLLM_OMNI_THINKER, _VLLM_OMNI_TALKER), strict=False):
        for theirs, ours in names.items():
            value = stage.get(theirs)
            if value is None:
                continue
            if theirs == "temperature" and value == 0:
                options[f"{ours.split('_')[0]}_do_sample"] = False
            else:
                options[ours] = 0 if theirs == "top_k" and value == -1 else value
    if "use_audio_in_video" in processor:
        options["use_audio_in_video"] = processor["use_audio_in_video"]
    return options


def check_lengths(options: Mapping[str, Any]) -> None:
    """Refuse lengths that contradict other options of a request, by their fields. Raises ApiError.

    The API would name its own options.
    """
    least = options.get("thinker_min_new_tokens", 0)
    most = options.get("thinker_max_new_tokens", RequestOptions.thinker_max_new_tokens)
    if least > most:
        message = f"min_tokens is {least}, more than the limit of the text, {most}. Lower it."
        raise wrong_value(message, "min_tokens")
    name = "min_tokens" if least else "ignore_eos"
    if (least or options.get("ignore_eos")) and has_grammar(options):
        raise wrong_value(
            f"{name} can't be given with tools, response_format or a grammar, which say themselves "
            "where the text ends. Leave one of them out.",
            name,
        )


def _option(name: str, value: Any, given: Mapping[str, Any]) -> Any:
    option = _OPTION[_OPTIONS[name]]
    value = 0 if name == "top_k" and value == -1 else value  # -1 is "all" for these engines
    values, own = option.doc.values, given.get(option.name)
    assert values is not None
    if not values.accepts(value):
        raise wrong_value(f"{name} must be {values.phrase}, got {format_value(value)}.", name)
    if own is not None and own != value:
        raise wrong_value(f"{name} and {option.name} are the same. Give one of them.", name)
    return value


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Return whether a value is the neutral one; a number may be written as 1 or 1.0."""
    alike = isinstance(value, bool) == isinstance(neutral, bool)
    return alike and bool(value == neutral)


def _not_neutral(name: str) -> ApiError:
    neutral = _NEUTRAL[name]
    message = f"{name} can only be {format_value(neutral.value)} here. {neutral.instead}"
    return wrong_value(message, name)


def _check_template(value: Any, thinks: bool) -> None:
    if not isinstance(value, Mapping) or set(value) - {_THINKS}:
        message = f"{_TEMPLATE} can only have {_THINKS} here. Leave it out."
        raise wrong_value(message, _TEMPLATE)
    if value.get(_THINKS) is not None:
        _check_thinks(value[_THINKS], thinks, f"{_TEMPLATE}.{_THINKS}")


def _check_thinks(wanted: Any, thinks: bool, name: str) -> None:
    if wanted is not thinks:
        does = "always thinks" if thinks else "never thinks"
        raise wrong_value(
            f"{name} can't be {format_value(wanted)}: this checkpoint {does}. Leave it out.", name
        )
