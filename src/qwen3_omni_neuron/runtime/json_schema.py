"""Bounds of JSON schemas, and OpenAI's rules for strict ones."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from qwen3_omni_neuron.errors import OptionError, format_value

MOST_CHARACTERS = 1 << 18  # all schemas of a request together
MOST_DEPTH = 64  # lists and objects inside each other in a schema's JSON
# Compiling takes time in the square of the optional properties: 40 ms for 300, 0.3 s for 1000.
MOST_OPTIONAL = 500
# OpenAI's limits.
MOST_PROPERTIES = 5000
MOST_NESTED = 10
MOST_ENUM_VALUES = 1000
MOST_NAME_CHARACTERS = 120_000
_REFUSED = ("allOf", "not", "dependentRequired", "dependentSchemas", "if", "then", "else")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_OBJECTS = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


def check_bounds(schemas: Mapping[str, Any]) -> None:
    """Refuse schemas, by name, that are too large to compile. Raises OptionError."""
    size = properties = optional = 0
    for where, schema in schemas.items():
        if not isinstance(schema, Mapping):
            raise OptionError(
                f"{where} must be a JSON schema, an object, got {format_value(schema)}."
            )
        _check_depth(schema, where)
        try:
            size += len(json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{where} can't be written as JSON: {error}.") from None
        for one, _ in _schemas(schema):
            names, required = one.get("properties"), one.get("required")
            if isinstance(names, Mapping):
                needed = set(map(str, required)) if isinstance(required, list | tuple) else set()
                properties += len(names)
                optional += len(set(names) - needed)
    for count, most, kind in (
        (size, MOST_CHARACTERS, "characters"),
        (properties, MOST_PROPERTIES, "properties"),
        (optional, MOST_OPTIONAL, "properties that are not required"),
    ):
        if count > most:
            names = ", ".join(schemas) if len(schemas) < 4 else f"{len(schemas)} schemas"
            raise OptionError(f"{names}: {count} {kind}, and at most {most} are taken together.")


def check_strict(schema: Mapping[str, Any], where: str) -> None:
    """Check OpenAI's rules for a strict schema. Raises OptionError for the first breach.

    Source: OpenAI's guide to structured outputs, "Supported schemas".
    """
    values = characters = 0
    breach = None
    if schema.get("type") != "object" or "anyOf" in schema:
        breach = "its root must be of type object, and no anyOf"
    for one, depth in _schemas(schema):
        if depth > MOST_NESTED:
            breach = breach or f"its objects are nested deeper than {MOST_NESTED} levels"
        breach = breach or _breach(one)
        enum, names = one.get("enum"), [one.get("const")]
        if isinstance(enum, list | tuple):
            values += len(enum)
            names += enum
        for key in ("properties", "$defs"):
            names += one[key] if isinstance(one.get(key), Mapping) else ()
        characters += sum(len(name) for name in names if isinstance(name, str))
    for count, most, kind in (
        (values, MOST_ENUM_VALUES, "values of enums"),
        (characters, MOST_NAME_CHARACTERS, "characters in its names and values"),
    ):
        if count > most:
            breach = breach or f"it has {count} {kind}, more than {most}"
    if breach is not None:
        raise OptionError(f"{where}: the schema is strict, and {breach}.")


def _breach(one: Mapping[str, Any]) -> str | None:
    """Return what breaks the rules in one schema, None if nothing."""
    for name in _REFUSED:
        if name in one:
            return f"{name} is not supported in strict schemas"
    if "properties" not in one and one.get("type") != "object":
        return None
    names, required = one.get("properties", {}), one.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list | tuple):
        return "properties must be an object and required a list"
    if one.get("additionalProperties") is not False:
        return "every object in it needs additionalProperties: false"
    missing = [name for name in names if name not in required]
    if missing:
        return (
            f"required must name every property, and lacks {format_value(missing[0])} (an optional "
            "one may be null)"
        )
    return None


def _check_depth(schema: Mapping[str, Any], where: str) -> None:
    """Check level by level: recursion would end at Python's limit."""
    level: list[Any] = [schema]
    for _ in range(MOST_DEPTH):
        inner = [v for one in level for v in (one.values() if isinstance(one, Mapping) else one)]
        level = [value for value in inner if isinstance(value, Mapping | list | tuple)]
        if not level or len(level) > MOST_CHARACTERS:
            break
    if level:
        raise OptionError(f"{where} is nested deeper than {MOST_DEPTH} lists and objects.")


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield a schema and all schemas in it, with their depth of objects.

    Without recursion: a schema may be deep. References are not followed.
    """
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        one, depth = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        yield one, depth
        inner = depth + ("properties" in one)
        for name in _OBJECTS:
            if isinstance(one.get(name), Mapping):
                at = depth if name in ("$defs", "definitions") else inner
                waiting += [(value, at) for value in one[name].values()]
        for name in (*_LISTS, *_SINGLE):
            value = one.get(name)
            waiting += [(v, depth) for v in (value if isinstance(value, list | tuple) else [value])]
