"""Parsing of request bodies: JSON limits, unions, and errors of fields."""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from qwen3_omni_neuron.errors import REMOVED_FIELDS, did_you_mean, removed
from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.serving.openai.errors import UNKNOWN, ApiError, wrong_value
from qwen3_omni_neuron.serving.service import Service

OTHER_MODELS = (
    *("gpt-", "chatgpt-", "whisper-", "tts-"),
    *("qwen-omni", "qwen2.5-omni", "qwen3-omni", "qwen3.5-omni", "qwen/qwen3-omni"),
)
"""Lower-case prefixes of the names of OpenAI's and Qwen's models."""
SMALL_BODY_BYTES = 1 << 12  # smaller bodies without media are parsed without a thread
# More than fit 32,768 tokens: an empty message in Qwen's template has 5.
MOST_MESSAGES = 1 << 13
MOST_TOOLS = 128  # OpenAI's limit
Body = TypeVar("Body", bound=BaseModel)
MOST_VALUES = 1 << 17  # commas and openings of lists and objects, also in strings
# A parser takes 40 to 60 ns per escape. Base64 sound has at most 1 in 64 characters ("\/"), and a
# million escapes exceed any prompt.
MOST_ESCAPES = 1 << 20
_STEP_BYTES = 1 << 16
_CODES = {
    **{"missing": "missing_required_parameter", "type": "invalid_type"},
    "extra_forbidden": UNKNOWN,
}
_UNION = "union"  # error type: no member of a union fits


class ClientObject(BaseModel):
    """Base of bodies and their objects. Unknown null fields are left out.

    further: names of additional fields; *: any, in objects that clients send back, except those
    with another role than assistant.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    further: ClassVar[Collection[str]] = ()

    @model_validator(mode="after")
    def _check_further(self) -> "ClientObject":
        pause()
        extra, further = self.model_extra or {}, self.may_have()
        for name in [name for name, value in extra.items() if value is None]:
            del extra[name]
        if self.__dict__.get("role", "assistant") != "assistant":
            further = {*further} - {"*"}
        for name in extra:
            if name not in further and "*" not in further:
                said = {"field": name, "said": unknown_field(self, name, further)}
                raise PydanticCustomError("extra_forbidden", "{said}", said)
        return self

    def may_have(self) -> Collection[str]:
        """Return the names of additional fields that this object may have."""
        return self.further


class OneOf:
    """Annotation of a union whose members differ in JSON type, or whose objects differ in `type`.

    Members' tags are in angle brackets, and left out of errors' paths.
    """

    def __init__(self, what: str = "", **by_field: str):
        """what: the values, for errors. by_field: types to leave out, by a sibling field."""
        self._what, self._by_field = what, by_field

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
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
    """Return the form of a member's values (str, list or dict), or its objects' types."""
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
    try:
        # model_validate_json would copy a union's values for its discriminator.
        return kind.model_validate(read_json(body, "body"))
    except ValidationError as error:
        raise refused_field(error) from error


def refused_field(
    error: ValidationError,
    before: str = "",
    what: str = "the body",
    see: str = "the table of fields in docs/serving.md",
) -> ApiError:
    """Return the error for a body's first wrong field. before: see `first_wrong`."""
    path, message = first_wrong(error, before)
    kind = error.errors(include_url=False)[0]["type"]
    kind = "type" if kind.endswith("_type") else kind
    message = f"{path or what}: {message} See {see}."
    return wrong_value(message, path or None, _CODES.get(kind, "invalid_value"))


def first_wrong(error: ValidationError, before: str = "") -> tuple[str, str]:
    """Return the path of the first wrong field, such as messages[0].content, and a sentence.

    before: path of the validated value.
    """
    first = error.errors(include_url=False)[0]
    path, message = before, first["msg"]
    names = [name for name in first["loc"] if isinstance(name, int) or name[:1] != "<"]
    if first["type"] == "extra_forbidden":
        names.append(first["ctx"]["field"])
    for name in names:
        path += f"[{name}]" if isinstance(name, int) else f".{name}" if path else name
    if first["type"] == _UNION and isinstance(first["input"], Mapping):
        path += ".type"
    elif first["type"] == "model_type":
        message = "Input should be an object"
    return path[:200], message if message[-1] in ".?" else f"{message[:300]}."


def unknown_field(given: BaseModel, name: str, further: Iterable[str]) -> str:
    """Return a sentence about an unknown field. further: names that it may have."""
    gone = removed(name, REMOVED_FIELDS)
    own = {field.alias or known for known, field in type(given).model_fields.items()}
    hint = did_you_mean(name, own.union(further) - {name})
    return "this field is unknown here." + (f" {gone}" if gone else hint)


def lower_name(**others: str) -> BeforeValidator:
    """Return a validator of names in any case; the field checks other values.

    others: names by synonym.
    """

    def change(value: Any) -> Any:
        name = value.lower() if isinstance(value, str) else value
        return others.get(name, name) if isinstance(name, str) else name

    return BeforeValidator(change)


def is_model(name: str, own: str) -> bool:
    """Return whether a client may use this model name. own: its name, beside OTHER_MODELS.

    A name may have the provider's prefix: openai/gpt-4o.
    """
    name = name.removeprefix("openai/")
    return name == own or name.lower().startswith(OTHER_MODELS)


def check_model(service: Service, name: str | None) -> None:
    """Refuse a request for another model. name: None if not named. Raises ApiError."""
    if name is not None and not is_model(name, service.model.name):
        own = service.model.name
        hint = did_you_mean(name, [own])
        message = f"there is no model {name[:80]!r} here, only {own!r}.{hint}"
        raise ApiError(404, message, "model_not_found", "model")


def read_json(text: bytes, what: str) -> Any:
    """Return the value of a JSON text. what: its name in errors. Raises ApiError.

    A parser keeps the interpreter lock, and turns 24 MiB of `[],` into 635 MiB in 1.9 s. So values
    and escapes are counted first, in steps of a few milliseconds.
    """
    values = escapes = 0
    for at in range(0, len(text), _STEP_BYTES):
        pause()
        step = text[at : at + _STEP_BYTES]
        values += sum(map(step.count, (b",", b"[", b"{")))
        escapes += step.count(b"\\")
        if values > MOST_VALUES or escapes > MOST_ESCAPES:
            message = (
                f"the {what} has more than {MOST_VALUES} values or {MOST_ESCAPES} escapes in its "
                "strings, such as \\n. Send less, or less at a time."
            )
            raise ApiError(400, message, "body_too_complex")
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        code = "body_too_complex" if "recursion limit" in str(error) else "invalid_json"
        raise ApiError(400, f"the {what} is not JSON: {str(error)[:200]}.", code) from error
