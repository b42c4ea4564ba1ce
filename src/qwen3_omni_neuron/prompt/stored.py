r"""File format of stored conversations: a document of JSON values and arrays <-> bytes.

    qwen3_omni_neuron conversation, format 1\n
    sha256 of the rest, 32 bytes
    size of the JSON in bytes, 8 bytes, little-endian
    JSON: {"kind", "fingerprint", "document", "arrays": [[place, dtype, shape], ...]}
    the arrays' bytes, one array after the other

An array's place is the list of keys and indices of its null in the document.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import StoredSessionError, printable
from qwen3_omni_neuron.prompt.media.fields import open_media

FORMAT = 1
_LINE = re.compile(rb"qwen3_omni_neuron conversation, format (\d{1,9})\n")
_DIGEST_BYTES, _SIZE_BYTES = 32, 8

Document = dict[str, Any]
_Place = tuple[str | int, ...]


def pack(kind: str, fingerprint: str, document: Mapping[str, Any]) -> bytes:
    """Return a document as bytes.

    kind: a name for the document's fields, such as "session". fingerprint: see
    `api.Qwen3Omni.checkpoint_fingerprint`. document: JSON values, and arrays.
    Raises StoredSessionError for a value that JSON lacks.
    """
    arrays: list[tuple[_Place, NDArray[Any]]] = []
    header = {
        "kind": kind,
        "fingerprint": fingerprint,
        "document": _without_arrays(document, (), arrays),
        "arrays": [[place, array.dtype.name, array.shape] for place, array in arrays],
    }
    try:
        text = json.dumps(
            header, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        ).encode()
    except (TypeError, ValueError) as error:
        raise StoredSessionError(
            f"the conversation has a value that can't be stored ({printable(str(error), 200)}). "
            "Leave it out of the session's options and messages."
        ) from error
    size = len(text).to_bytes(_SIZE_BYTES, "little")
    body = b"".join([size, text, *(array.tobytes() for _, array in arrays)])
    line = f"qwen3_omni_neuron conversation, format {FORMAT}\n".encode()
    return line + hashlib.sha256(body).digest() + body


def unpack(data: bytes, kind: str, fingerprint: str, where: str) -> Document:
    """Return the packed document, with copied arrays. where: its name in errors.

    Raises StoredSessionError for damaged data, and another format, kind or fingerprint.
    """
    line = _LINE.match(data)
    if line is None:
        raise StoredSessionError(
            f"{where} is not a stored conversation: its first line is missing. Name a file that "
            "`Session.save` wrote."
        )
    if int(line[1]) != FORMAT:
        raise StoredSessionError(
            f"{where} is stored in format {int(line[1])}, but this version reads format {FORMAT}. "
            "Install the version that wrote it, or the newest one."
        )
    begin = line.end() + _DIGEST_BYTES
    body = memoryview(data)[begin:]
    if hashlib.sha256(body).digest() != data[line.end() : begin]:
        raise StoredSessionError(
            f"{where} is damaged: its {len(data)} bytes do not match the stored checksum. Use "
            "another copy."
        )
    at = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
    header = json.loads(bytes(body[_SIZE_BYTES:at]))
    if header["kind"] != kind:
        raise StoredSessionError(f"{where} is a stored {header['kind']}, not a stored {kind}.")
    if header["fingerprint"] != fingerprint:
        raise StoredSessionError(
            f"{where} was stored with another checkpoint (fingerprint "
            f"{header['fingerprint'][:12]}, this one has {fingerprint[:12]}). Load that one."
        )
    document: Document = header["document"]
    for (*path, last), dtype, shape in header["arrays"]:
        value: Any = document
        for key in path:
            value = value[key]
        count = math.prod(shape)
        value[last] = np.frombuffer(body, dtype, count, at).reshape(shape).copy()
        at += value[last].nbytes
    return document


def read_file(path: Path, kind: str, fingerprint: str) -> Document:
    """Return a file's document. Raises StoredSessionError, also for an unreadable file."""
    with open_media(path, "the stored conversation", StoredSessionError) as file:
        try:
            data = file.read()
        except OSError as error:
            raise StoredSessionError(f"{path} can't be read ({error.strerror}).") from error
    return unpack(data, kind, fingerprint, str(path))


def _without_arrays(value: Any, place: _Place, arrays: list[tuple[_Place, NDArray[Any]]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append((place, value))
        return None
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, (*place, str(k)), arrays) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_arrays(v, (*place, i), arrays) for i, v in enumerate(value)]
    return value
