"""Events of DashScope, Qwen's service, <-> OpenAI events: flat sessions, other names."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from qwen3_omni_neuron.serving.openai.errors import wrong_value

Json = dict[str, Any]
DASHSCOPE_PATH = "/api-ws/v1/realtime"
DASHSCOPE_HEADER = b"x-dashscope-sdk-client"
_PLACES: Mapping[str, tuple[str, ...]] = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "max_tokens": ("max_output_tokens",),
} | {
    name: (f"thinker_{name}",)
    for name in ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty")
}
"""Places of a flat session's names in OpenAI's."""
_TURNED_OFF = ("input_audio_transcription", "turn_detection")  # by null, elsewhere absence
_OF_RESPONSES = ("modalities", "voice", "output_audio_format")  # shown in a response
# For both pcm and pcm16.
_RATES = {"input_audio_format": 16000, "output_audio_format": 24000}
_OF_SERVER_VAD = ("threshold", "prefix_padding_ms", "silence_duration_ms")
FIRST: Json = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}}
"""Initial fields of a session."""


def heard(event: Json) -> Json:
    """Convert a client's event to an OpenAI event. Raises ApiError."""
    if event.get("type") == "input_image_buffer.append":
        if not isinstance(event.get("image"), str):
            raise wrong_value("image: Input should be a JPEG file in base64.", "image")
        part = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{event['image']}"}
        item = {"type": "message", "role": "user", "content": [part]}
        event = {name: value for name, value in event.items() if name != "image"}
        return event | {"type": "conversation.item.create", "item": item}
    given = {n: event[n] for n in ("session", "response") if isinstance(event.get(n), dict)}
    return event | {name: _nested(fields) for name, fields in given.items()}


def told(kind: str, fields: Json) -> tuple[str, Json] | None:
    """Return a server event with DashScope's names, or None if it lacks the event."""
    if kind == "conversation.item.done":
        return None
    if kind == "conversation.item.added":
        kind = "conversation.item.created"
    if kind.startswith("response.output_") and "item" not in kind:
        kind = kind.replace("output_", "", 1)
    shown = {"session": _flat, "response": _flat, "item": _item, "error": _error}
    return kind, fields | {n: show(fields[n]) for n, show in shown.items() if n in fields}


def _nested(given: Json) -> Json:
    """Move a client's flat fields to OpenAI's places."""
    made: Json = {}
    for name, value in given.items():
        absent = value is None and name not in _TURNED_OFF
        if absent or name == "smooth_output" or (name == "enable_search" and not value):
            continue
        *outer, last = _PLACES.get(name, (name,))
        inner = made
        for step in outer:
            inner = inner.setdefault(step, {})
        inner[last] = _value(name, value)
    if "thinker_temperature" in made:
        made["thinker_do_sample"] = made["thinker_temperature"] != 0
        if not made["thinker_do_sample"]:
            del made["thinker_temperature"]
    return made


def _value(name: str, value: Any) -> Any:
    if name in _RATES and value in ("pcm", "pcm16", "pcm24"):
        return {"type": "audio/pcm", "rate": _RATES[name]}
    if name == "modalities" and value in (["text", "audio"], ["audio", "text"]):
        return ["audio"]
    if name == "turn_detection" and isinstance(value, dict):
        if value.get("type") == "semantic_vad":  # the SDK also sends fields of server_vad
            return {n: v for n, v in value.items() if n not in _OF_SERVER_VAD}
        return {"silence_duration_ms": 800, **value}
    if name == "tools" and isinstance(value, list):
        return [_out_of_function(tool) for tool in value]
    return _out_of_function(value) if name == "tool_choice" else value


def _out_of_function(given: Any) -> Any:
    """Return a tool or tool choice without the object `function` around its fields."""
    inner = given.get("function") if isinstance(given, dict) else None
    return {"type": given.get("type"), **inner} if isinstance(inner, dict) else given


def _flat(given: Json) -> Json:
    made = {name: value for name, value in given.items() if name not in ("type", "audio")}
    for name in _OF_RESPONSES if "output" in given else _PLACES:
        value: Any = given
        for step in _PLACES[name]:
            value = value.get(step) if isinstance(value, dict) else None
        made.pop(_PLACES[name][0], None)
        if name in _RATES and value is not None:
            made[name] = "pcm"
        elif name == "modalities" and value is not None:
            made[name] = ["text", "audio"] if value == ["audio"] else ["text"]
        elif value is not None or name in _TURNED_OFF:
            made[name] = value
    if made.pop("thinker_do_sample", True) is False:
        made["temperature"] = 0
    if "output" in given:
        made["output"] = [_item(item) for item in given["output"]]
    if made.get("tools"):
        bare = ({n: v for n, v in tool.items() if n != "type"} for tool in made["tools"])
        made["tools"] = [{"type": "function", "function": tool} for tool in bare]
    return made


def _item(item: Json) -> Json:
    if item.get("role") != "assistant":
        return item
    types = {"output_text": "text", "output_audio": "audio"}
    parts = [part | {"type": types.get(part["type"], part["type"])} for part in item["content"]]
    return item | {"content": parts}


def _error(error: Json) -> Json:
    made = dict(error)
    for key, name in product(("message", "param"), _PLACES):
        if made[key]:
            made[key] = made[key].replace(f".{'.'.join(_PLACES[name])}", f".{name}")
    return made
