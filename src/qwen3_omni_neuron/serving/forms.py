"""Bodies of multipart/form-data, read from memory: fields, and the bytes of one file."""

from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from typing import NoReturn

from qwen3_omni_neuron.serving.errors import ApiError

MOST_PARTS, MOST_HEAD_BYTES, MOST_FIELD_BYTES = 32, 1 << 12, 1 << 16


@dataclass(frozen=True)
class Form:
    """Fields by name, in a list those whose name ends in []; and files by name."""

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_form(body: bytes, content_type: str) -> Form:
    """Read a body. Raises ApiError 400 where it is cut short or malformed, or has too many parts.

    It is held once more at most: nothing is written to a file.
    """
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        _refuse("its content-type is not multipart/form-data with a boundary")
    line = b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
    # One more split than parts: what begins the body, and what ends it.
    parts = (b"\r\n" + body).split(line, MOST_PARTS + 2)
    if len(parts) > MOST_PARTS + 2:
        _refuse(f"it has more than {MOST_PARTS} parts")
    if len(parts) < 2 or parts[0].strip() or parts[-1].strip() != b"--":
        _refuse("it does not begin and end with its boundary: was it cut short?")
    form = Form()
    for part in parts[1:-1]:
        _read_part(part, form)
    return form


def _read_part(part: bytes, form: Form) -> None:
    end = part.find(b"\r\n\r\n", 0, MOST_HEAD_BYTES)
    if end < 0 or not part.startswith(b"\r\n"):
        _refuse(f"a part has no headers that end within {MOST_HEAD_BYTES} bytes")
    head = HeaderParser().parsestr(part[2:end].decode("utf-8", "replace"))
    name = head.get_param("name", header="content-disposition")
    if head.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        _refuse("a part has no content-disposition with a name")
    content = part[end + 4 :]
    if head.get_filename() is not None or name == "file":
        if name in form.files:
            _refuse(f"{name[:80]!r} is there twice")
        form.files[name] = content
        return
    if len(content) > MOST_FIELD_BYTES:
        _refuse(f"field {name[:80]!r} has more than {MOST_FIELD_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        _refuse(f"field {name[:80]!r} is not UTF-8")
    if name.endswith("[]"):
        values = form.fields.setdefault(name[:-2], [])
        if isinstance(values, str):
            _refuse(f"{name[:80]!r} is there twice")
        values.append(text)
    elif name in form.fields:
        _refuse(f"{name[:80]!r} is there twice")
    else:
        form.fields[name] = text


def _refuse(why: str) -> NoReturn:
    raise ApiError(
        400,
        f"the body can't be read as a form: {why}. Send multipart/form-data with the parts file "
        "and model.",
        "invalid_form",
    )
