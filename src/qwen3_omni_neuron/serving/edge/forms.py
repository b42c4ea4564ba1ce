"""Parser of multipart/form-data bodies in memory."""

from dataclasses import dataclass, field
from io import BytesIO
from typing import NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import (
    Field,
    File,
    MultipartParser,
    MultipartState,
    create_form_parser,
)

from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.serving.openai.errors import ApiError

_PIECE_BYTES = 1 << 20
MOST_PARTS, MOST_FIELD_BYTES = 32, 1 << 16
_IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": float("inf")}  # the gate limits the whole body


@dataclass(frozen=True)
class Form:
    """Fields by name, lists if it ends in [], and files by name."""

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def add_field(self, part: Field) -> None:
        """Add a field. Raises ApiError."""
        name, value = _text(part.field_name, "a name"), part.value or b""
        if len(value) > MOST_FIELD_BYTES:
            _refuse(f"field {name[:80]!r} has more than {MOST_FIELD_BYTES} bytes")
        text = _text(value, f"field {name[:80]!r}")
        self._check_parts()
        key = name.removesuffix("[]")
        before = self.fields.get(key)
        if key == name and before is None:
            self.fields[key] = text
        elif key != name and not isinstance(before, str):
            self.fields[key] = [*(before or ()), text]
        else:
            _refuse(f"{name[:80]!r} appears twice")

    def add_file(self, part: File) -> None:
        """Add a file. Raises ApiError."""
        name = _text(part.field_name, "a name")
        if name in self.files:
            _refuse(f"{name[:80]!r} appears twice")
        self._check_parts()
        assert isinstance(part.file_object, BytesIO), "no file is written"
        self.files[name] = part.file_object.getvalue()  # without a copy
        part.close()

    def _check_parts(self) -> None:
        values = (value if isinstance(value, list) else [value] for value in self.fields.values())
        if sum(map(len, values)) + len(self.files) >= MOST_PARTS:
            _refuse(f"it has more than {MOST_PARTS} parts")


def read_form(body: bytes, content_type: str) -> Form:
    """Parse a body in memory, with one copy of its content.

    Raises ApiError 400 if it is truncated, malformed, or has too many parts.
    """
    form = Form()
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        _refuse("its content-type is not multipart/form-data")
    try:
        headers = {"Content-Type": content_type.encode("latin-1", "replace")}
        parser = create_form_parser(headers, form.add_field, form.add_file, _IN_MEMORY)
        for start in range(0, len(body), _PIECE_BYTES):
            pause()
            parser.write(body[start : start + _PIECE_BYTES])
        parser.finalize()
    except FormParserError as error:
        _refuse(str(error)[:200])
    inner = parser.parser
    if not isinstance(inner, MultipartParser) or inner.state != MultipartState.END:
        _refuse("it does not end with its boundary; it may be truncated")
    return form


def _text(value: bytes | None, what: str) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        _refuse(f"{what} is not UTF-8")


def _refuse(why: str) -> NoReturn:
    raise ApiError(
        400,
        f"the body can't be read as a form: {why}. Send multipart/form-data with the parts file "
        "and model.",
        "invalid_form",
    )
