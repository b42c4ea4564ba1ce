"""Bodies of multipart/form-data, read from memory: fields, and the bytes of one file."""

import re
from dataclasses import dataclass, field
from typing import NoReturn

from qwen3_omni_neuron.serving.errors import ApiError

_PARAMETER = re.compile(r';\s*([\w*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.ASCII)
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
    kind, parameters = _header(content_type)
    boundary = parameters.get("boundary")
    if kind != "multipart/form-data" or not boundary:
        _refuse("its content-type is not multipart/form-data with a boundary")
    line = b"\r\n--" + boundary.encode("latin-1", "replace")
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
    lines = part[2:end].decode("utf-8", "replace").split("\r\n")
    headers = {name.strip().lower(): text for name, _, text in (x.partition(":") for x in lines)}
    kind, parameters = _header(headers.get("content-disposition", ""))
    name = parameters.get("name")
    if kind != "form-data" or not name:
        _refuse("a part has no content-disposition with a name")
    content = part[end + 4 :]
    if name == "file" or parameters.keys() & {"filename", "filename*"}:
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


def _header(value: str) -> tuple[str, dict[str, str]]:
    """Return a header's value without its parameters, and these."""
    found = {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
        for name, quoted, plain in _PARAMETER.findall(value)
    }
    return value.partition(";")[0].strip().lower(), found


def _refuse(why: str) -> NoReturn:
    raise ApiError(
        400,
        f"the body can't be read as a form: {why}. Send multipart/form-data with the parts file "
        "and model.",
        "invalid_form",
    )
