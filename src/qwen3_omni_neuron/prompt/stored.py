r"""File format of stored conversations: a document of JSON values and arrays <-> bytes.

    qwen3_omni_neuron conversation, format 1\n
    sha256 of all that follows, 32 bytes
    size of the JSON in bytes, 8 bytes, little-endian
    JSON: {"kind", "fingerprint", "document", "arrays": [[place, dtype, shape], ...]}
    the arrays' bytes, one array after the other

In the document an array is null; its place is the list of keys and indices that lead there.

The bytes may come from anyone: nothing in them is run, and sizes are checked before memory is taken
for them. The checksum finds damage and not forgery, so whoever reads a document checks its values.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import StoredSessionError, printable
from qwen3_omni_neuron.prompt.media.fields import open_media

FORMAT = 1
MOST_BYTES = 1 << 32
"""Size limit of a stored conversation: 18 hours of speech, or 1,800 large pictures of videos."""
_MOST_JSON_BYTES = 1 << 24  # text of 3 million tokens
_MOST_VALUES = 1 << 20  # values of the JSON: a parser takes up to 72 bytes for each
_LINE = re.compile(rb"qwen3_omni_neuron conversation, format (\d{1,9})\n")
_DTYPES = ("float32", "int64", "uint8")
_MOST_SIDES = 4
_DIGEST_BYTES, _SIZE_BYTES = 32, 8

Document = dict[str, Any]
Array = NDArray[Any]
_Place = tuple[str | int, ...]


def pack(kind: str, fingerprint: str, document: Mapping[str, Any]) -> bytes:
    """Return a document as bytes.

    kind: a name for the document's fields, such as "session". fingerprint: that of the checkpoint;
    see `api.Qwen3Omni.checkpoint_fingerprint`. document: JSON values, and arrays of float32, int64
    or uint8 as values in it.
    Raises StoredSessionError for a document that is too large, or has a value that JSON lacks.
    """
    return b"".join(packed(kind, fingerprint, document))


def packed(kind: str, fingerprint: str, document: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return what `pack` does, in parts; the last ones are the arrays, which are not copied."""
    arrays: list[tuple[_Place, Array]] = []
    header = {
        "kind": kind,
        "fingerprint": fingerprint,
        "document": _without_arrays(document, (), arrays),
        "arrays": [[place, array.dtype.name, array.shape] for place, array in arrays],
    }
    layout: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
    try:
        text = json.dumps(header, allow_nan=False, **layout).encode()
    except (TypeError, ValueError) as error:
        raise StoredSessionError(
            f"the conversation has a value that can't be stored ({printable(str(error), 200)}). "
            "Leave it out of the session's options and messages."
        ) from error
    _check_text(text, "the conversation")
    parts: list[bytes | memoryview] = [len(text).to_bytes(_SIZE_BYTES, "little"), text]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in arrays]
    check_size(sum(map(len, parts)), "the conversation")
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    line = f"qwen3_omni_neuron conversation, format {FORMAT}\n".encode()
    return [line, digest.digest(), *parts]


def unpack(data: bytes | bytearray, kind: str, fingerprint: str, where: str) -> Document:
    """Return the document that `pack` was given, with arrays of its own.

    where: name of the data in errors.
    Raises StoredSessionError for data that are not a stored conversation, are damaged, or have
    another format, kind or fingerprint.
    """
    line = _LINE.match(data)
    if line is None:
        raise StoredSessionError(
            f"{where} is not a stored conversation: it does not begin as one. Name a file that "
            "`Session.save` has written."
        )
    if int(line[1]) != FORMAT:
        raise StoredSessionError(
            f"{where} is stored in format {int(line[1])}, and this version reads format {FORMAT}. "
            "Install the version that has stored it, or the newest one: its wheel, or "
            "pip install . in its checkout."
        )
    begin = line.end() + _DIGEST_BYTES
    body = memoryview(data)[begin:]
    if hashlib.sha256(body).digest() != data[line.end() : begin]:
        raise StoredSessionError(
            f"{where} is damaged: its {len(data)} bytes do not have the checksum that they were "
            "stored with. It was cut short or changed; take another copy of it."
        )
    try:
        return _read(body, kind, fingerprint, where)
    except StoredSessionError:
        raise
    except (IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise StoredSessionError(
            f"{where} is not a conversation as this package stores it "
            f"({printable(repr(error), 200)})."
        ) from error


def read_file(path: Path, kind: str, fingerprint: str) -> Document:
    """Return the document in a file. Raises StoredSessionError, also if it can't be read."""
    with open_media(path, "the stored conversation", StoredSessionError) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(size, str(path))
        try:
            data = file.read(size)
        except OSError as error:
            raise StoredSessionError(f"{path} can't be read ({error.strerror}).") from error
    return unpack(data, kind, fingerprint, str(path))


def check_size(size: int, where: str) -> None:
    """Raise StoredSessionError for more than MOST_BYTES. where: what has so many bytes."""
    if size > MOST_BYTES:
        raise StoredSessionError(
            f"{where} has {size} bytes; {MOST_BYTES} is the most that is stored. Remove turns, or "
            "begin another session with the last of its messages."
        )


def _without_arrays(value: Any, place: _Place, arrays: list[tuple[_Place, Array]]) -> Any:
    """Return a copy of a value with None for its arrays, which are appended to `arrays`."""
    if isinstance(value, np.ndarray):
        assert value.dtype.name in _DTYPES, f"an array of {value.dtype} at {place}"
        arrays.append((place, value))
        return None
    if isinstance(value, Mapping):
        return {str(k): _without_arrays(v, (*place, str(k)), arrays) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_arrays(v, (*place, i), arrays) for i, v in enumerate(value)]
    return value


def _check_text(text: bytes, where: str) -> None:
    """Raise StoredSessionError for a JSON text that is too long, or has too many values."""
    values = sum(map(text.count, (b",", b"[", b"{")))  # and as many as its strings have of these
    if len(text) > _MOST_JSON_BYTES or values > _MOST_VALUES:
        raise StoredSessionError(
            f"{where} has {len(text)} bytes of text, tools and options with {values} values in "
            f"them; {_MOST_JSON_BYTES} and {_MOST_VALUES} are the most that are stored. Remove "
            "turns, or begin another session with the last of its messages."
        )


def _read(body: memoryview, kind: str, fingerprint: str, where: str) -> Document:
    """Return the document in what follows the checksum. Raises errors as `unpack` lists them."""
    end = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
    if end > len(body):
        raise ValueError("its JSON is longer than all of it")
    text = bytes(body[_SIZE_BYTES : min(end, _SIZE_BYTES + _MOST_JSON_BYTES + 1)])
    _check_text(text, where)
    header = json.loads(text, parse_constant=_refuse)
    if header["kind"] != kind:
        raise StoredSessionError(
            f"{where} is a stored {printable(str(header['kind']), 40)}, not a stored {kind}."
        )
    if header["fingerprint"] != fingerprint:
        raise StoredSessionError(
            f"{where} was stored with another checkpoint (fingerprint "
            f"{printable(str(header['fingerprint']), 12)}, this one has {fingerprint[:12]}). Load "
            "the checkpoint that it was made with."
        )
    document, at = header["document"], end
    for place, dtype, shape in header["arrays"]:
        array, at = _array(body, at, dtype, shape)
        _put(document, place, array)
    if at != len(body) or not isinstance(document, dict):
        raise ValueError("the arrays do not fill the rest of the file")
    return document


def _array(body: memoryview, at: int, dtype: Any, shape: Any) -> tuple[Array, int]:
    """Copy the array that begins at a byte. Returns it, and where the next one begins."""
    # A shape of a million sides would multiply for minutes.
    known = dtype in _DTYPES and len(shape) <= _MOST_SIDES
    if not known or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("an array of it has another type or shape")
    end = at + math.prod(shape) * np.dtype(dtype).itemsize
    if end > len(body):
        raise ValueError("an array of it is longer than the rest")
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).data[:] = body[at:end]
    return array, end


def _put(document: Any, place: Sequence[Any], array: Array) -> None:
    """Put an array into a document, where it has null."""
    *path, last = place
    for key in path:
        document = document[key]
    if document[last] is not None:
        raise ValueError("an array of it has the place of another value")
    document[last] = array


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has the number {constant}")
