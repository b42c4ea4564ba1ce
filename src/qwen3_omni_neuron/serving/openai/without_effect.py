"""Fields of OpenAI's API that are taken and have no effect here: one table for all endpoints.

They change how an answer is made or kept, not what it says, so that a client that sends them by
default is answered. Each use is counted: `Metrics.without_effect`. A field that would
change the answer's meaning is not in the table: it is refused by its name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.serving.endpoints.sound import can_stretch

_EMPTY: Sequence[Any] = (None, "", [], {})
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
TRANSCRIPTIONS, REALTIME = "/v1/audio/transcriptions", "/v1/realtime"


@dataclass(frozen=True)
class WithoutEffect:
    """A field without effect.

    reason: why it has none. default: value that asks for nothing, beside null and what is empty.
    honoured: returns whether the field has its effect here after all; None: it never has.
    """

    reason: str
    default: Any = None
    honoured: Callable[[], bool] | None = None


_MODEL = WithoutEffect("a name of one of OpenAI's models is another name of the one model here")
_LANGUAGE = "the model finds the language by itself"
_KEYWORDS = "the model takes no list of words to expect"
_KEPT = WithoutEffect("nothing is stored beyond the request", False)
_OWNER = WithoutEffect("callers are told apart by their API key")
_CACHE = WithoutEffect("what prompts share is reused in any case; `cache_key` keeps it apart")

FIELDS: Mapping[str, Mapping[str, WithoutEffect]] = {
    CHAT: {
        "model": _MODEL,
        "user": _OWNER,
        "safety_identifier": _OWNER,
        "metadata": _KEPT,
        "store": _KEPT,
        "prompt_cache_key": _CACHE,
        "prompt_cache_retention": _CACHE,
        "prompt_cache_options": _CACHE,
        "prediction": WithoutEffect("no text is taken as a guess of the answer"),
        "service_tier": WithoutEffect("there is one tier", "auto"),
        "verbosity": WithoutEffect("the model has no such setting", "medium"),
        "reasoning_effort": WithoutEffect("the checkpoint thinks, or it does not"),
    },
    SPEECH: {
        "model": _MODEL,
        "instructions": WithoutEffect("a voice has one manner of speaking"),
    },
    TRANSCRIPTIONS: {
        "model": _MODEL,
        "language": WithoutEffect(f"{_LANGUAGE}; verbose_json repeats it", "unknown"),
        "languages": WithoutEffect(_LANGUAGE),
        "keywords": WithoutEffect(_KEYWORDS),
        "prompt": WithoutEffect("what was said before the audio is not taken as its context"),
    },
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
        "reasoning": WithoutEffect("the checkpoint thinks, or it does not"),
        "tracing": WithoutEffect("no traces are written"),
    },
}
"""By path of the endpoint, and by the field's name, with dots where it is inside of others."""


def sent_without_effect(path: str, given: Any, model: str) -> Iterator[str]:
    """Yield the names of the fields without effect that a client has sent.

    given: the fields of its request or session, as a mapping or a pydantic model. model: name of
    the server's model, which asks for nothing.
    """
    for name, field in FIELDS[path].items():
        if field.honoured is not None and field.honoured():
            continue
        default = model if name == "model" else field.default
        values = _values(given, name.split("."))
        if any(value not in _EMPTY and value != default for value in values):
            yield name


def _values(given: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values of a field, one for each item of a list on the way to it."""
    if not names:
        yield given
    elif isinstance(given, list):
        for item in given:
            yield from _values(item, names)
    else:
        get = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
        inner = get(names[0])
        if inner is not None:
            yield from _values(inner, names[1:])
