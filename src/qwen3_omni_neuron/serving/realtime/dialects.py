"""Dialects of the socket: OpenAI's of today, its beta's, and that of DashScope, Qwen's own service.

The conversation speaks OpenAI's alone. A client's events are translated to it before they are read,
and the server's events back before they are written.
"""

from collections.abc import Mapping
from typing import Any

from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.realtime.events import Json
from qwen3_omni_neuron.serving.realtime.session_config import merged

DASHSCOPE_PATH = "/api-ws/v1/realtime"
DASHSCOPE_HEADER = b"x-dashscope-sdk-client"
BETA_HEADER = b"openai-beta"
# By their names in a flat session: the places of fields in a session of today.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "max_response_output_tokens": ("max_output_tokens",),
    "temperature": ("thinker_temperature",),
}
# Fields that null turns off. Elsewhere null is like a field that is not there.
_TURNED_OFF = ("input_audio_transcription", "input_audio_noise_reduction", "turn_detection")
_OF_RESPONSES = ("modalities", "voice", "output_audio_format")  # that a response shows
_DASHSCOPE_PLACES: Mapping[str, tuple[str, ...]] = {
    **_PLACES,
    "max_tokens": ("max_output_tokens",),
    "top_p": ("thinker_top_p",),
    "top_k": ("thinker_top_k",),
    "repetition_penalty": ("thinker_repetition_penalty",),
    "presence_penalty": ("thinker_presence_penalty",),
}
_TODAYS = {"type", "audio", "output_modalities", "max_output_tokens"}
_PCM_16K: Json = {"type": "audio/pcm", "rate": 16000}
_PCM_24K: Json = {"type": "audio/pcm", "rate": 24000}
_BETA_FORMATS: Mapping[str, Json] = {
    "pcm16": _PCM_24K,
    "g711_ulaw": {"type": "audio/pcmu"},
    "g711_alaw": {"type": "audio/pcma"},
}
# Its SDK writes pcm16 for both directions, and its documents pcm: the rates are always these.
_DASHSCOPE_INPUT: Mapping[str, Json] = {"pcm": _PCM_16K, "pcm16": _PCM_16K}
_DASHSCOPE_OUTPUT = dict.fromkeys(("pcm", "pcm16", "pcm24"), _PCM_24K)
_DASHSCOPE_ALONE = ("pcm", "pcm24")  # formats that the beta did not have
_DASHSCOPE_SILENCE_MS = 800
_PARTS = {"output_text": "text", "output_audio": "audio"}  # types of a reply's parts in items


class Dialect:
    """OpenAI's dialect of today, which needs no translation.

    first: fields with which a session begins, as today's.
    """

    def __init__(self) -> None:
        self.first: Json = {}

    def heard(self, event: Json) -> Json:
        """Return a client's event in OpenAI's dialect of today. Raises ApiError."""
        return event

    def told(self, kind: str, fields: Json) -> tuple[str, Json] | None:
        """Return a server event in this dialect, None if it has none such."""
        return kind, fields


class FlatDialect(Dialect):
    """OpenAI's beta: a flat session, and other names of events, parts and formats."""

    def __init__(
        self,
        places: Mapping[str, tuple[str, ...]] = _PLACES,
        input_formats: Mapping[str, Json] = _BETA_FORMATS,
        output_formats: Mapping[str, Json] = _BETA_FORMATS,
    ):
        super().__init__()
        self._places = places
        self._formats = {
            "input_audio_format": input_formats,
            "output_audio_format": output_formats,
        }

    def heard(self, event: Json) -> Json:
        """Return a client's event in OpenAI's dialect of today. Raises ApiError."""
        made = dict(event)
        for name in ("session", "response"):
            if isinstance(given := event.get(name), dict):
                made[name] = self._nested(given, name)
        if isinstance(item := event.get("item"), dict):
            made["item"] = _renamed(item, {new: old for old, new in _PARTS.items()})
        return made

    def told(self, kind: str, fields: Json) -> tuple[str, Json] | None:
        """Return a server event in this dialect, None if it has none such."""
        if kind == "conversation.item.done":
            return None
        if kind == "conversation.item.added":
            kind = "conversation.item.created"
        if kind.startswith("response.output_") and "item" not in kind:
            kind = kind.replace("output_", "", 1)
        made = dict(fields)
        for name in ("session", "response"):
            if name in fields:
                made[name] = self._flat(fields[name])
        if "item" in fields:
            made["item"] = _renamed(fields["item"], _PARTS)
        if kind == "error":
            error = fields["error"]
            changed = {n: self._in_words(error[n]) for n in ("message", "param") if error.get(n)}
            made["error"] = {**error, **changed}
        return kind, made

    def _nested(self, given: Json, where: str) -> Json:
        """Return a client's flat fields as those of today. where: session or response."""
        made: Json = {}
        if "audio" in given:
            message = (
                f"{where}.audio is of OpenAI's Realtime API of today, and this socket began with "
                "the flat fields of its beta. Give voice, input_audio_format and the like, or "
                'begin with a session.update that has "type": "realtime" alone.'
            )
            raise wrong_value(message, f"{where}.audio")
        for name, value in given.items():
            if value is None and name not in _TURNED_OFF:
                continue
            *outer, last = self._places.get(name, (name,))
            inner = made
            for step in outer:
                inner = inner.setdefault(step, {})
            inner[last] = self._value(name, value, f"{where}.{name}")
        if "thinker_temperature" in made:
            made["thinker_do_sample"] = made["thinker_temperature"] != 0
            if not made["thinker_do_sample"]:
                del made["thinker_temperature"]
        if isinstance(items := made.get("input"), list):
            old = {new: old for old, new in _PARTS.items()}
            made["input"] = [_renamed(i, old) if isinstance(i, dict) else i for i in items]
        return made

    def _value(self, name: str, value: Any, path: str) -> Any:
        """Return a field's value as it is today. Raises ApiError."""
        if name in self._formats:
            formats = self._formats[name]
            if not isinstance(value, str) or value not in formats:
                known = ", ".join(formats)
                message = f"{path} is {str(value)[:80]!r}, and there are {known}."
                raise wrong_value(message, path)
            return formats[value]
        if name == "modalities":
            if value not in (["text"], ["text", "audio"], ["audio", "text"]):
                message = f'{path} is ["text"], or ["text", "audio"] for speech and its text.'
                raise wrong_value(message, path)
            return ["audio"] if "audio" in value else ["text"]
        return value

    def _flat(self, given: Json) -> Json:
        """Return a session or response as clients of this dialect know it."""
        made = {name: value for name, value in given.items() if name not in ("type", "audio")}
        names = _OF_RESPONSES if "output" in given else self._places
        for name in names:
            first, *further = self._places[name]
            value = given.get(first)
            for step in further:
                value = value.get(step) if isinstance(value, Mapping) else None
            made.pop(first, None)
            if value is not None or name in _TURNED_OFF:
                made[name] = self._shown(name, value)
        if made.pop("thinker_do_sample", True) is False:
            made["temperature"] = 0
        if "output" in given:
            made["output"] = [_renamed(item, _PARTS) for item in given["output"]]
        return made

    def _shown(self, name: str, value: Any) -> Any:
        if name == "modalities":
            return ["text", "audio"] if value == ["audio"] else ["text"]
        if name in self._formats:
            formats = self._formats[name]
            same = (n for n, form in formats.items() if {**value, **form} == value)
            return next(same, next(iter(formats)))
        return value

    def _in_words(self, text: str) -> str:
        """Return the text of an error with this dialect's names of fields."""
        for where in ("session", "response"):
            for name, place in self._places.items():
                text = text.replace(f"{where}.{'.'.join(place)}", f"{where}.{name}")
        return text


class DashScopeDialect(FlatDialect):
    """DashScope's: the beta's names, sound of 16 kHz in and 24 kHz out, and tools as in a chat."""

    def __init__(self) -> None:
        super().__init__(_DASHSCOPE_PLACES, _DASHSCOPE_INPUT, _DASHSCOPE_OUTPUT)
        self.first = {"audio": {"input": {"format": _PCM_16K}}}

    def heard(self, event: Json) -> Json:
        """Return a client's event in OpenAI's dialect of today. Raises ApiError."""
        if event.get("type") != "input_image_buffer.append":
            return super().heard(event)
        image = event.get("image")
        if not isinstance(image, str):
            message = "image: Input should be a JPEG file in base64."
            raise wrong_value(message, "image")
        part = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{image}"}
        item = {"type": "message", "role": "user", "content": [part]}
        made = {"type": "conversation.item.create", "item": item}
        kept = {name: value for name, value in event.items() if name not in ("type", "image")}
        return kept | made

    def _nested(self, given: Json, where: str) -> Json:
        left = dict(given)
        left.pop("smooth_output", None)
        if left.pop("enable_search", None):
            message = f"{where}.enable_search: this server searches nothing. Leave it out."
            raise ApiError(400, message, "unsupported", f"{where}.enable_search")
        rates = {"input": left.pop("sample_rate", None), "output": None}
        audio = left.pop("audio", None)
        for side, rate in rates.items():
            form = _at(audio, side, "format")
            rates[side] = form.get("sample_rate", rate)
            if form:
                left[f"{side}_audio_format"] = form.get("type", "pcm")
        made = super()._nested(left, where)
        for side, rate in rates.items():
            if rate is None:
                continue
            if rate not in (16000, 24000):
                path = f"{where}.audio.{side}.format.sample_rate"
                message = f"{path} is {str(rate)[:80]}, and there are 16000 and 24000."
                raise wrong_value(message, path)
            inner = made.setdefault("audio", {}).setdefault(side, {})
            inner["format"] = {"type": "audio/pcm", "rate": rate}
        return made

    def _value(self, name: str, value: Any, path: str) -> Any:
        if name == "tools" and isinstance(value, list):
            return [_out_of_function(tool) for tool in value]
        if name == "tool_choice":
            return _out_of_function(value)
        if name == "turn_detection" and isinstance(value, dict):
            if value.get("type") == "semantic_vad":  # the SDK sends fields of server_vad, too
                vads = ("threshold", "prefix_padding_ms", "silence_duration_ms")
                return {n: v for n, v in value.items() if n not in vads}
            return {"silence_duration_ms": _DASHSCOPE_SILENCE_MS, **value}
        return super()._value(name, value, path)

    def _flat(self, given: Json) -> Json:
        made = super()._flat(given)
        if "tools" in made:
            made["tools"] = [
                {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}
                for tool in made["tools"] or ()
            ]
        return made


TODAY, BETA, DASHSCOPE = Dialect(), FlatDialect(), DashScopeDialect()


class Interpreter:
    """Translates the events of one socket.

    The request may tell its client's dialect: DashScope's by path or header, the beta's by header.
    Otherwise the first session.update does whose fields are of one dialect alone; it may also
    overrule the beta's header.
    """

    def __init__(self, path: str, headers: Mapping[bytes, bytes]):
        dashscope = path == DASHSCOPE_PATH or DASHSCOPE_HEADER in headers
        beta = b"realtime=v1" in headers.get(BETA_HEADER, b"")
        self._dialect = DASHSCOPE if dashscope else BETA if beta else TODAY
        self._decided = dashscope
        self._missing: Json = {}  # fields that the session did not begin with

    @property
    def first(self) -> Json:
        """Fields with which the session begins, as today's."""
        return self._dialect.first

    def heard(self, event: Json) -> Json:
        """Return a client's event in OpenAI's dialect of today. Raises ApiError."""
        session = event.get("session")
        if event.get("type") != "session.update" or not isinstance(session, dict):
            return self._dialect.heard(event)
        if not self._decided:
            self._decide(session)
        made = self._dialect.heard(event)
        if not self._missing:
            return made
        return {**made, "session": merged(self._missing, made["session"])}

    def told(self, kind: str, fields: Json) -> tuple[str, Json] | None:
        """Return a server event in the client's dialect, None if it has none such."""
        if kind == "session.updated":
            self._missing = {}
        return self._dialect.told(kind, fields)

    def _decide(self, session: Json) -> None:
        dashscope = any(
            name in _DASHSCOPE_ALONE
            for side in ("input", "output")
            for name in (session.get(f"{side}_audio_format"), _format_type(session, side))
        )
        flat = session.keys() & _PLACES.keys() and "audio" not in session
        if dashscope:
            self._dialect = DASHSCOPE
            self._missing = DASHSCOPE.first
        elif session.keys() & _TODAYS:
            self._dialect = TODAY
        elif flat:
            self._dialect = BETA
        else:
            return
        self._decided = True


def _format_type(session: Json, side: str) -> Any:
    return _at(session.get("audio"), side, "format").get("type")


def _at(given: Any, *names: str) -> Json:
    """Return the object inside of objects, an empty one if it is not there."""
    for name in names:
        given = given.get(name) if isinstance(given, dict) else None
    return given if isinstance(given, dict) else {}


def _renamed(item: Json, names: Mapping[str, str]) -> Json:
    """Return an item with other types of the parts of an assistant's content."""
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return item
    return item | {
        "content": [
            part | {"type": names[part["type"]]}
            if isinstance(part, dict) and part.get("type") in list(names)
            else part
            for part in content
        ]
    }


def _out_of_function(given: Any) -> Any:
    """Return a tool, or the choice of one, without the object `function` around its fields."""
    inner = given.get("function") if isinstance(given, dict) else None
    if not isinstance(inner, dict):
        return given
    return {**{n: v for n, v in given.items() if n != "function"}, **inner}
