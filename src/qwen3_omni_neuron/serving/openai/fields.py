"""Fields that clients send beside those that a body's class declares: one table for all endpoints.

Each is honoured as an option, or has no effect, or is refused but for the value that changes
nothing. null is such a value everywhere. docs/serving.md has the table, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
RESPONSE = f"{RESPONSES}/{{response_id}}"
INPUT_ITEMS = f"{RESPONSE}/input_items"
SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
REALTIME, ITEM = "/v1/realtime", "conversation.item.create"  # the socket, and an event of it
LOGPROBS = "message.output_text.logprobs"
"""What a response may include of its text."""

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
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "echo"), (False, "")),
    "length_penalty": (1, ""),
    "logit_bias": ({}, ""),
    "stop_token_ids": ([], "thinker_eos_token_id, with all tokens that end the text"),
    "suffix": ("", ""),
    "add_generation_prompt": (True, ""),
    "continue_final_message": (False, COMPLETIONS),
    "priority": (0, ""),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"),
        (None, f"response_format or grammar in {CHAT}"),
    ),
}
"""Fields of these engines and of chat: the only value, and what to use instead."""

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
    SPEECH: {"": "model instructions"},
    TRANSCRIPTIONS: {"": "model language languages keywords prompt"},
    REALTIME: {
        "": "model prompt reasoning tracing",
        "audio.input": "noise_reduction",
        "audio.input.transcription": "model language languages keywords prompt delay",
        "audio.output": "speed",  # where PyAV is not installed
    },
    ITEM: {
        "": "object status *",
        "content[]": "id index format annotations logprobs",
    },
}
"""By path or event, and by the object that a field is in: names of fields without effect.

[] stands after a list, and * for further fields of an object that clients send back as they got it.
"""
WITHOUT_EFFECT: Mapping[str, Sequence[str]] = {
    path: [f"{at}.{name}".lstrip(".") for at, names in places.items() for name in names.split()]
    for path, places in NO_EFFECT.items()
}
"""Names of the fields without effect, with the objects that they are in: for documents."""
# Values that ask for nothing, beside null, what is empty, and the server's own model.
_NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("metadata", "store", "return_stage_metrics", "include_obfuscation"), False),
    **{"service_tier": "auto", "verbosity": "medium", "language": "unknown", "speed": 1},
    f"{RESPONSES} include": [LOGPROBS],
}


@cache
def names_in(path: str, where: str) -> frozenset[str]:
    """Return the names of the fields without effect directly in an object, such as messages[].

    where: "" for the request or item itself.
    """
    return frozenset(NO_EFFECT[path].get(where, "").split())


def sent_without_effect(path: str, given: Any, model: str) -> list[str]:
    """Return the names of the fields without effect that a client has sent.

    given: the fields of its request or session, as a mapping or a pydantic model. model: name of
    the server's model, which asks for nothing.
    """
    return list(dict.fromkeys(_sent(path, "", given, model)))


def _sent(path: str, where: str, given: Any, model: str) -> Iterator[str]:
    if isinstance(given, list):
        for item in given:
            yield from _sent(path, f"{where}[]", item, model)
    if not isinstance(given, Mapping | BaseModel):
        return
    extra = (given.model_extra or {}) if isinstance(given, BaseModel) else {}
    fields = given if isinstance(given, Mapping) else {**given.__dict__, **extra}
    names, inner = names_in(path, where), _objects(path)
    for field, value in fields.items():
        name = f"{where}.{field}" if where else field
        if name in inner:
            yield from _sent(path, name, value, model)
        elif field in names or ("*" in names and field in extra):
            nothing = _NOTHING.get(f"{path} {field}", _NOTHING.get(field))
            nothing = model if field == "model" else nothing
            if value in (None, "", [], {}, nothing) or (field == "speed" and find_spec("av")):
                continue
            yield name if field in names else name.removesuffix(field) + "*"


@cache
def _objects(path: str) -> frozenset[str]:
    """Return the names of all objects and lists that lead to a field without effect."""
    found = set[str]()
    for where in NO_EFFECT[path]:
        parts = where.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            found |= {name, name.removesuffix("[]")}
    return frozenset(found)
