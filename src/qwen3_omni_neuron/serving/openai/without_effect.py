"""Fields of OpenAI's API that are taken and have no effect here: one table for all endpoints.

They change how an answer is made or kept, not what it says, so that a client that sends them by
default is answered. Each use is counted: `Metrics.without_effect`. A field that would
change the answer's meaning is not in the table: it is refused by its name.

A name has dots where a field is inside of others, `[]` after a list, and `*` for all further fields
of an object that clients send back as they got it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from pydantic import BaseModel

from qwen3_omni_neuron.serving.endpoints.sound import can_stretch

_EMPTY: Sequence[Any] = (None, "", [], {})
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SPEECH, REALTIME = "/v1/audio/speech", "/v1/realtime"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
COMPLETIONS = "/v1/completions"
RESPONSE = "/v1/responses/{response_id}"
INPUT_ITEMS = f"{RESPONSE}/input_items"
LOGPROBS = "message.output_text.logprobs"
"""What a response may include of its text."""
ITEM = "conversation.item.create"  # an event of the socket


@dataclass(frozen=True)
class WithoutEffect:
    """A field without effect.

    reason: why it has none. default: value that asks for nothing, beside null and what is empty.
    honoured: returns whether the field has its effect here after all; None: it never has.
    """

    reason: str
    default: Any = None
    honoured: Callable[[], bool] | None = None


_MODEL = WithoutEffect("a name of OpenAI's or Qwen's models is another name of the one model here")
_LANGUAGE = "the model finds the language by itself"
_PROMPT = WithoutEffect("what was said before the audio is not taken as its context")
_KEYWORDS = "the model takes no list of words to expect"
_KEPT = WithoutEffect("nothing is stored beyond the request", False)
_OWNER = WithoutEffect("callers are told apart by their API key")
_CACHE = WithoutEffect("what prompts share is reused in any case; `cache_key` keeps it apart")
_SENT_BACK = WithoutEffect("a reply may be sent back as it came")
_LABEL = WithoutEffect("the prompt has no place for it")
_SCHEMA = WithoutEffect("text is held to the schema, of which the model reads nothing")
_FORMAT = WithoutEffect("the content says which format it has")
_VERBOSITY = WithoutEffect("the model has no such setting", "medium")
_REASONING = WithoutEffect("the checkpoint thinks, or it does not")
_OF_CONVERSATIONS = {
    "user": _OWNER,
    "safety_identifier": _OWNER,
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "service_tier": WithoutEffect("there is one tier", "auto"),
}

# Fields that engines' clients send, in chat and completions.
_ENGINES = {
    "request_id": WithoutEffect("an answer's `x-request-id` is the server's"),
    "rid": WithoutEffect("an answer's `x-request-id` is the server's"),
    "return_stage_metrics": WithoutEffect("/metrics has the stages' times", False),
}

FIELDS: Mapping[str, Mapping[str, WithoutEffect]] = {
    CHAT: {
        "model": _MODEL,
        **_OF_CONVERSATIONS,
        "metadata": _KEPT,
        "store": _KEPT,
        "prediction": WithoutEffect("no text is taken as a guess of the answer"),
        "verbosity": _VERBOSITY,
        "reasoning_effort": _REASONING,
        "stream_options.include_obfuscation": WithoutEffect("pieces are not padded"),
        **_ENGINES,
        "response_format.json_schema.name": _SCHEMA,
        "response_format.json_schema.description": _SCHEMA,
        "tools[].cache_control": _CACHE,
        "tools[].function.cache_control": _CACHE,
        "messages[].name": _LABEL,
        "messages[].id": _LABEL,
        "messages[].index": _LABEL,
        "messages[].metadata": _LABEL,
        "messages[].cache_control": _CACHE,
        "messages[].*": WithoutEffect("an assistant's message may be sent back as it came"),
        "messages[].audio.*": _SENT_BACK,
        "messages[].tool_calls[].*": _SENT_BACK,
        "messages[].tool_calls[].function.*": _SENT_BACK,
        "messages[].content[].id": _LABEL,
        "messages[].content[].index": _LABEL,
        "messages[].content[].uuid": _LABEL,
        "messages[].content[].role": _SENT_BACK,
        "messages[].content[].annotations": _SENT_BACK,
        "messages[].content[].logprobs": _SENT_BACK,
        "messages[].content[].cache_control": _CACHE,
        "messages[].content[].prompt_cache_breakpoint": _CACHE,
        "messages[].content[].input_audio.format": _FORMAT,
        "messages[].content[].audio_url.format": _FORMAT,
        "messages[].content[].image_url.format": _FORMAT,
        "messages[].content[].video_url.format": _FORMAT,
    },
    COMPLETIONS: {
        "model": _MODEL,
        "user": _OWNER,
        "stream_options.include_obfuscation": WithoutEffect("pieces are not padded"),
        **_ENGINES,
    },
    RESPONSES: {
        "model": _MODEL,
        **_OF_CONVERSATIONS,
        "reasoning": _REASONING,
        "text.verbosity": _VERBOSITY,
        "text.format.name": _SCHEMA,
        "text.format.description": _SCHEMA,
        "include": WithoutEffect(f"there is nothing to include but `{LOGPROBS}`", [LOGPROBS]),
        "max_tool_calls": WithoutEffect("it limits built-in tools, and there are none"),
        "moderation": WithoutEffect("nothing is moderated"),
        "stream_options": WithoutEffect("events have no obfuscation"),
        "client_metadata": WithoutEffect("nothing is stored of it"),
        **_ENGINES,
        "tools[].cache_control": _CACHE,
        "input[].id": _SENT_BACK,
        "input[].status": _SENT_BACK,
        "input[].phase": _SENT_BACK,
        "input[].caller": _SENT_BACK,
        "input[].name": _LABEL,
        "input[].cache_control": _CACHE,
        "input[].*": WithoutEffect("what a response has said may be sent back as it came"),
        "input[].content[].id": _LABEL,
        "input[].content[].index": _LABEL,
        "input[].content[].annotations": _SENT_BACK,
        "input[].content[].logprobs": _SENT_BACK,
        "input[].content[].cache_control": _CACHE,
        "input[].content[].prompt_cache_breakpoint": _CACHE,
        "input[].output[].cache_control": _CACHE,
        "input[].output[].prompt_cache_breakpoint": _CACHE,
    },
    RESPONSE: {
        "include": WithoutEffect("a response is read as it was kept"),
        "include_obfuscation": WithoutEffect("there are no events to pad", False),
        "starting_after": WithoutEffect("there are no events to begin after"),
    },
    INPUT_ITEMS: {"include": WithoutEffect("items are listed as they were kept")},
    SPEECH: {
        "model": _MODEL,
        "instructions": WithoutEffect("a voice has one manner of speaking"),
    },
    TRANSCRIPTIONS: {
        "model": _MODEL,
        "language": WithoutEffect(f"{_LANGUAGE}; verbose_json repeats it", "unknown"),
        "languages": WithoutEffect(_LANGUAGE),
        "keywords": WithoutEffect(_KEYWORDS),
        "prompt": _PROMPT,
    },
    TRANSLATIONS: {"model": _MODEL, "prompt": _PROMPT},
    REALTIME: {
        "model": _MODEL,
        "audio.input.noise_reduction": WithoutEffect("sound is heard as it is sent"),
        "audio.input.transcription.model": WithoutEffect("the model that answers transcribes"),
        "audio.input.transcription.language": WithoutEffect(_LANGUAGE),
        "audio.input.transcription.languages": WithoutEffect(_LANGUAGE),
        "audio.input.transcription.keywords": WithoutEffect(_KEYWORDS),
        "audio.input.transcription.prompt": WithoutEffect("the transcript has no context"),
        "audio.input.transcription.delay": WithoutEffect(
            "speech is transcribed by windows of at most 8 s"
        ),
        "audio.output.speed": WithoutEffect(
            "only where PyAV is not installed (the extra `video`): the session shows 1.0",
            1,
            can_stretch,
        ),
        "prompt": WithoutEffect("prompts that are stored at OpenAI are not here"),
        "reasoning": _REASONING,
        "tracing": WithoutEffect("no traces are written"),
    },
    ITEM: {
        "object": _SENT_BACK,
        "status": _SENT_BACK,
        "*": WithoutEffect("an assistant's item may be sent back as it came"),
        "content[].id": _LABEL,
        "content[].index": _LABEL,
        "content[].format": _FORMAT,
        "content[].annotations": _SENT_BACK,
        "content[].logprobs": _SENT_BACK,
    },
}
"""By path of the endpoint or kind of the event, and by the field's name."""


@cache
def names_in(path: str, where: str) -> frozenset[str]:
    """Return the names of the fields without effect directly in an object, such as messages[].

    where: "" for the request or item itself.
    """
    before = f"{where}." if where else ""
    found = [name.removeprefix(before) for name in FIELDS[path] if name.startswith(before)]
    return frozenset(name for name in found if "." not in name)


def sent_without_effect(path: str, given: Any, model: str) -> list[str]:
    """Return the names of the fields without effect that a client has sent.

    given: the fields of its request or session, as a mapping or a pydantic model. model: name of
    the server's model, which asks for nothing.
    """
    found: list[str] = []
    _find(path, given, _tree(path), model, found)
    return found


@cache
def _tree(path: str) -> Mapping[str, Any]:
    """Return the names of the table by their parts: a name, or the names inside of an object."""
    tree: dict[str, Any] = {}
    for name in FIELDS[path]:
        *outer, last = name.replace("[]", "").split(".")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = name
    return tree


def _find(path: str, given: Any, tree: Mapping[str, Any], model: str, found: list[str]) -> None:
    """Add the names of the fields in `given` that ask for something."""
    if isinstance(given, list):
        for item in given:
            _find(path, item, tree, model, found)
        return
    if not isinstance(given, Mapping | BaseModel):
        return
    declared = given if isinstance(given, Mapping) else given.__dict__
    extra = (given.model_extra or {}) if isinstance(given, BaseModel) else {}
    for name, value in chain(declared.items(), extra.items()):
        node = tree.get(name) or (tree.get("*") if name in extra else None)
        if isinstance(node, Mapping):
            _find(path, value, node, model, found)
        elif node is not None and node not in found and value not in _EMPTY:
            field = FIELDS[path][node]
            default = model if node == "model" else field.default
            if value != default and not (field.honoured is not None and field.honoured()):
                found.append(node)
