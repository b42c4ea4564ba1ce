"""Parsing of request bodies: limits of the JSON, unions, and errors of fields."""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
)
from pydantic_core import from_json

from qwen3_omni_neuron.errors import REMOVED_FIELDS, did_you_mean, removed
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value
from qwen3_omni_neuron.serving.service import Service

OTHER_MODELS = (
    *("gpt-", "chatgpt-", "whisper-", "tts-"),
    *("qwen-omni", "qwen2.5-omni", "qwen3-omni", "qwen3.5-omni", "qwen/qwen3-omni"),
)
"""Beginnings of the names of OpenAI's and Qwen's models, in lower case, which clients send."""
SMALL_BODY_BYTES = 1 << 12  # a smaller body without media is parsed at once, without a thread
# More than fit into a prompt of 32,768 tokens: an empty message in Qwen's template has 5 tokens.
MOST_MESSAGES = 1 << 13
MOST_TOOLS = 128  # OpenAI's limit
Body = TypeVar("Body", bound=BaseModel)
MOST_VALUES = 1 << 16  # most values in a JSON text; a chat message has three or more
MOST_DEPTH = 64  # nesting of lists and objects
# A parser takes 40 to 60 ns for each escape. Sound in base64 has at most 1 in 64 characters ("\/"),
# and a million escapes are more text than a prompt holds.
MOST_ESCAPES = 1 << 20
_STEP_BYTES = 1 << 16
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_UNION = "union"  # type of the error of a union that no member fits


class StrictObject(BaseModel):
    """Base of objects in JSON that have no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class OpenObject(BaseModel):
    """Base of objects whose further fields are kept, and checked by `check_further`."""

    model_config = ConfigDict(strict=True, extra="allow")


class OneOf:
    """Annotation of a union whose members are told apart by their form, and objects by `type`.

    The tags of members stand in angle brackets, and are left out of the paths of errors.
    """

    def __init__(self, what: str = "", **by_field: str):
        """what: the values, for errors. by_field: types that are left out, by a field beside."""
        self._what, self._by_field = what, by_field

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the schema of the union."""
        members = [(_kinds_of(member), member) for member in get_args(source)]
        tags = {kind: f"<{kinds[0]}>" for kinds, _ in members for kind in kinds}

        def tag(value: Any) -> str | None:
            kind: Any = type(value) if isinstance(value, str | list) else dict
            fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            if kind is dict and dict not in tags:
                kind = fields.get("type")
                if kind is None:
                    found = (k for name, k in self._by_field.items() if name in fields)
                    kind = next(found, None)
            return None if isinstance(kind, dict | list) else tags.get(kind)

        what = self._what or f"an object with a type: {', '.join(map(str, tags))}"
        message = f"Input should be {what}"
        found = Discriminator(tag, custom_error_type=_UNION, custom_error_message=message)
        tagged = tuple(Annotated[member, Tag(f"<{kinds[0]}>")] for kinds, member in members)
        return handler.generate_schema(Annotated[Union[tagged], found])  # noqa: UP007


def _kinds_of(member: Any) -> tuple[Any, ...]:
    """Return the form of a member's values, str, list or dict, or the types of its objects."""
    inner = get_args(member)[0] if get_origin(member) is Annotated else member
    if inner is str or get_origin(inner) is Literal:
        return (str,)
    if get_origin(inner) is list:
        return (list,)
    kind = inner.model_fields.get("type") if hasattr(inner, "model_fields") else None
    alone = [one for one in get_args(kind.annotation) if one is not type(None)] if kind else []
    return (get_args(alone[0]) or tuple(alone)) if alone else (dict,)


def parse_json(kind: type[Body], body: bytes) -> Body:
    """Parse a JSON body. Raises ApiError, which names the first wrong field."""
    check_json(body)
    try:
        # Not model_validate_json: it would copy a union's values for the union's discriminator.
        return kind.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        raise refused_field(error, kind) from error
    except ValueError as error:
        message = f"the body is not JSON: {str(error)[:200]}."
        raise ApiError(400, message, "invalid_json") from error


def refused_field(error: ValidationError, kind: type[BaseModel] | None = None) -> ApiError:
    """Return the error for the first wrong field of a body. kind: as of `first_wrong`."""
    path, message = first_wrong(error, kind=kind)
    message = f"{path or 'the body'}: {message} See the table of fields in docs/serving.md."
    return wrong_value(message, path or None)


def first_wrong(
    error: ValidationError, before: str = "", kind: type[BaseModel] | None = None
) -> tuple[str, str]:
    """Return the path of the first wrong field, such as messages[0].content, and what is wrong.

    before: path of the value that was validated. kind: what it should be, for a hint at the field
    that an unknown one may mean.
    """
    first = error.errors(include_url=False)[0]
    loc, unknown, message, hint = first["loc"], first["type"] == "extra_forbidden", first["msg"], ""
    path = before
    for place, name in enumerate(loc):
        if isinstance(name, int):
            path += f"[{name}]"
        # A tag of a union, unless it is an unknown field's name.
        elif not (name[:1] == "<" and name[-1:] == ">") or (unknown and place == len(loc) - 1):
            path += f".{name}" if path else name
    if first["type"] == _UNION and isinstance(first["input"], Mapping):
        path += ".type"
    if unknown:
        message, hint = "this field is unknown here", _hint(str(loc[-1]), _names(kind))
    elif first["type"] == "model_type":
        message = "Input should be an object"
    return path[:200], f"{message[:300]}.{hint}"


@cache
def _names(kind: type[BaseModel] | None) -> frozenset[str]:
    """Return the names of all fields of an object, and of the objects in it."""
    schema = kind.model_json_schema() if kind else {}
    objects = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for one in objects for name in one.get("properties", ()))


def _hint(name: str, known: Iterable[str]) -> str:
    """Return what a client may use instead of an unknown field, after a space, or ""."""
    gone = removed(name, REMOVED_FIELDS)
    return f" {gone}" if gone else did_you_mean(name, {*known} - {name})


def check_further(given: BaseModel, where: str, taken: Collection[str]) -> None:
    """Refuse the further fields of an object, except null and those that are taken.

    where: path of the object, "" for the body. taken: their names; * for any. Raises ApiError.
    """
    for name, value in (given.model_extra or {}).items():
        if value is not None and name not in taken and "*" not in taken:
            path = f"{where}.{name}"[:200] if where else name[:80]
            raise wrong_value(f"{path}: {unknown_field(given, name, taken)}", path)


def unknown_field(given: BaseModel, name: str, taken: Iterable[str]) -> str:
    """Return what is wrong with a further field. taken: names that it may have."""
    hint = _hint(name, [*type(given).model_fields, *taken])
    return f"this field is unknown here.{hint} See docs/serving.md."


def lower_name(**others: str) -> BeforeValidator:
    """Return a validator of names in any case. others: other names of some, by what clients write.

    Any other value is left to the field's own check.
    """

    def change(value: Any) -> Any:
        name = value.lower() if isinstance(value, str) else value
        return others.get(name, name) if isinstance(name, str) else name

    return BeforeValidator(change)


def is_model(name: str, own: str) -> bool:
    """Return whether a client may call the model so. own: its name, beside OTHER_MODELS.

    A name may have the prefix that clients of several providers write: openai/gpt-4o.
    """
    name = name.removeprefix("openai/")
    return name == own or name.lower().startswith(OTHER_MODELS)


def check_model(service: Service, name: str | None) -> None:
    """Refuse a request for another model. None: the request names none. Raises ApiError."""
    if name is not None and not is_model(name, service.model.name):
        own = service.model.name
        hint = did_you_mean(name, [own])
        message = f"there is no model {name[:80]!r} here, only {own!r}.{hint}"
        raise ApiError(404, message, "model_not_found", "model")


def check_json(body: bytes) -> None:
    """Refuse a JSON text that is too complex, before it is parsed. Raises ApiError.

    A parser holds the interpreter lock, and makes 635 MiB of 24 MiB of `[],` in 1.9 s, where
    72 MiB are counted. This is linear in the text, in steps of some milliseconds. Whether it is
    valid is left to the parser.
    """
    at, in_string = 0, False
    values = quotes = escapes = depth = 0
    while at < len(body):
        step = body[at : at + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # include the escaped character in the step
            step = body[at : at + _STEP_BYTES + 1]
        at += len(step)
        if b"\\" in step:
            escapes += step.count(b"\\")
            _check_count(escapes, MOST_ESCAPES, "escapes in its strings, such as \\n")
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        # The remaining quotes begin and end strings: a key and its value have four.
        in_step = step.count(b'"')
        quotes += in_step
        _check_count(quotes // 4, MOST_VALUES, "values")
        outside = b"".join(step.split(b'"')[in_string::2])
        in_string ^= in_step % 2 == 1
        values += sum(map(outside.count, (b",", b"[", b"{")))
        _check_count(values, MOST_VALUES, "values")
        for bracket in outside.translate(None, _NOT_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            _check_count(depth, MOST_DEPTH, "lists and objects in each other")
            if depth < 0:
                return  # the parser stops here, too


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(
            400,
            f"the JSON has more than {most} {what}, the most that are taken. Send less, or less "
            "at a time.",
            "body_too_complex",
        )
