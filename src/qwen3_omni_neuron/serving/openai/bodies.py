"""Parsing of request bodies: limits of the JSON, unions, errors of fields, a request's options."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

from qwen3_omni_neuron.errors import did_you_mean
from qwen3_omni_neuron.removed import FIELDS, removed
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
# By pydantic's type of an error.
_MESSAGES = {
    "extra_forbidden": "this field is unknown here",
    "model_type": "Input should be an object",
}


class StrictObject(BaseModel):
    """Base of objects in JSON that have no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class OpenObject(BaseModel):
    """Base of objects whose further fields are kept, and checked by `check_further`."""

    model_config = ConfigDict(strict=True, extra="allow")


class ByType:
    """Annotation of a union of objects that are told apart by their `type`."""

    def __init__(self, by_name: Mapping[str, str] | None = None):
        """by_name: types of objects that leave it out, by a field that they have."""
        self._by_name = by_name or {}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the schema of the union."""
        types = [_type_of(member) for member in get_args(source)]

        def tag(value: Any) -> str | None:
            fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            found = fields.get("type")
            if found is None:
                found = next((kind for name, kind in self._by_name.items() if name in fields), None)
            return found if isinstance(found, str) and found in types else None

        return handler.generate_schema(
            _tagged(source, types, tag, "an object with a type: ", types)
        )


class ByForm:
    """Annotation of a union whose members are told apart by the kind of their JSON value."""

    def __init__(self, *forms: str):
        """forms: what a value of each member is, for errors."""
        self._forms = forms

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the schema of the union."""
        kinds = list(map(_kind_of, get_args(source)))

        def tag(value: Any) -> str:
            kind = "list" if isinstance(value, list) else "object"
            return "text" if isinstance(value, str) else kind

        return handler.generate_schema(_tagged(source, kinds, tag, "", self._forms))


def _tagged(
    union: Any,
    tags: Sequence[str],
    tag: Callable[[Any], str | None],
    what: str,
    forms: Sequence[str],
) -> Any:
    """Return a union with tags in angle brackets, which paths leave out.

    tag: returns the tag of a value. what, forms: what a value should be.
    """
    members = [
        Annotated[member, Tag(f"<{name}>")]
        for member, name in zip(get_args(union), tags, strict=True)
    ]
    listed = forms[0] if len(forms) == 1 else f"{', '.join(forms[:-1])} or {forms[-1]}"
    found = Discriminator(
        lambda value: (name := tag(value)) and f"<{name}>",
        custom_error_type=_UNION,
        custom_error_message=f"Input should be {what}{listed}",
    )
    return Annotated[Union[tuple(members)], found]  # noqa: UP007


def _kind_of(member: Any) -> str:
    """Return the kind of a member's JSON value: text, list or object, which numbers are, too."""
    inner = get_args(member)[0] if get_origin(member) is Annotated else member
    if inner is str or get_origin(inner) is Literal:
        return "text"
    return "list" if get_origin(inner) is list else "object"


def _type_of(member: Any) -> str:
    """Return the value of an object's field `type`, which may be left out."""
    annotation = member.model_fields["type"].annotation
    literal = annotation if get_origin(annotation) is Literal else get_args(annotation)[0]
    return str(get_args(literal)[0])


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
    """Return the path of the first wrong field, and what is wrong with it, in a sentence.

    before: path of the value that was validated. kind: what it should be, for a hint at the field
    that an unknown one may mean. A path is such as messages[0].content[2].type.
    """
    first = error.errors(include_url=False)[0]
    loc, unknown = first["loc"], first["type"] == "extra_forbidden"
    path = before
    for place, name in enumerate(loc):
        if isinstance(name, int):
            path += f"[{name}]"
        # A tag of a union, unless it is an unknown field's name.
        elif not (name[:1] == "<" and name[-1:] == ">") or (unknown and place == len(loc) - 1):
            path += f".{name}" if path else name
    if first["type"] == _UNION and isinstance(first["input"], Mapping):
        path += ".type"
    message = _MESSAGES.get(first["type"], first["msg"])[:300]
    hint = _hint(str(loc[-1]), _names(kind) if kind else ()) if unknown else ""
    return path[:200], f"{message}.{hint}"


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of all fields of an object, and of the objects in it."""
    schema = kind.model_json_schema()
    objects = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for one in objects for name in one.get("properties", ()))


def _hint(name: str, known: Iterable[str]) -> str:
    """Return what a client may use instead of an unknown field, after a space, or ""."""
    gone = removed(name, FIELDS)
    return f" {gone}" if gone else did_you_mean(name, {*known} - {name})


def check_further(given: BaseModel, where: str, taken: Collection[str]) -> None:
    """Refuse the further fields of an object, except null and those without effect.

    where: path of the object. taken: names of those without effect. Raises ApiError.
    """
    for name, value in (given.model_extra or {}).items():
        if value is not None and name not in taken and "*" not in taken:
            path = f"{where}.{name}"[:200]
            hint = _hint(name, [*type(given).model_fields, *taken])
            raise wrong_value(
                f"{path}: this field is unknown here.{hint} See docs/serving.md.", path
            )


def check_known(given: BaseModel, known: Collection[str], options: Collection[str]) -> None:
    """Refuse the further fields of a body, except null and known ones. Raises ApiError.

    options: names of those that the error lists.
    """
    for name, value in (given.model_extra or {}).items():
        if value is not None and name not in known:
            raise wrong_value(unknown_field(given, name, options), name[:80])


def unknown_field(given: BaseModel, name: str, options: Collection[str]) -> str:
    """Return what is wrong with a further field of a body. options: names that it may have."""
    hint = _hint(name, [*type(given).model_fields, *options])
    known = ", ".join(sorted(options))
    return f"unknown field {name[:80]!r}.{hint} Beside OpenAI's fields there may be: {known}."


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

    A parser makes an object of each value, and holds the interpreter lock to the end: 30 MiB of
    `[],` would be 10 million objects, 20 seconds and gigabytes. This takes time linear in the text,
    in steps of a few milliseconds, and stops at the first limit that is exceeded. It does not check
    whether the text is valid JSON: the parser does.
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
