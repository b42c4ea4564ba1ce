"""Grammar fields of vLLM and SGLang clients as the option `grammar`."""

import json
from collections.abc import Mapping
from typing import Any

from qwen3_omni_neuron.errors import format_value
from qwen3_omni_neuron.serving.openai.bodies import read_json
from qwen3_omni_neuron.serving.openai.errors import UNKNOWN, wrong_value
from qwen3_omni_neuron.serving.openai.fields import GRAMMAR_FIELDS, STRUCTURED, STRUCTURED_FIELDS

Json = dict[str, Any]


def grammar_of(given: Mapping[str, Any]) -> tuple[str, Json] | None:
    """Return the path of a body's grammar field, and the option's value; None without one.

    given: additional fields of a body. Raises ApiError.
    """
    inner = given.get(STRUCTURED) or {}
    if not isinstance(inner, Mapping):
        raise wrong_value(f"{STRUCTURED} must be an object, got {format_value(inner)}.", STRUCTURED)
    for name in inner.keys() - STRUCTURED_FIELDS.keys():
        if inner[name] not in (None, False):
            known = ", ".join(STRUCTURED_FIELDS)
            path = f"{STRUCTURED}.{name}"[:200]
            raise wrong_value(
                f"{path}: this field is unknown here. It may have {known}.", path, UNKNOWN
            )
    asked = {name: (kind, given.get(name)) for name, kind in GRAMMAR_FIELDS.items()}
    asked |= {f"{STRUCTURED}.{n}": (kind, inner.get(n)) for n, kind in STRUCTURED_FIELDS.items()}
    (path, (kind, value)), *others = [
        *((path, one) for path, one in asked.items() if one[1] not in (None, False)),
        ("", ("", None)),
    ]
    if len(others) > 1:
        raise wrong_value(f"give {path} or {others[0][0]}, not both.", others[0][0])
    return (path, _option(path, kind, value)) if path else None


def _option(path: str, kind: str, value: Any) -> Json:
    if kind == "json" and isinstance(value, str):
        value = read_json(value.encode(), path)
    if kind == "json" and isinstance(value, Mapping):
        return {"json": value}
    if kind == "json_object" and value is True:
        return {"json": {"type": "object"}}
    if kind in ("regex", "lark") and isinstance(value, str):
        return {kind: value}
    texts = [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
    if kind == "choice" and texts and len(texts) == len(value):
        return {"lark": "start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in texts)}
    what = {"json": "a JSON schema", "json_object": "true", "choice": "a list of strings"}
    raise wrong_value(f"{path} must be {what.get(kind, 'a string')}.", path)
