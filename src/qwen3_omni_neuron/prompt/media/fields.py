"""Fields of a media item: the file or bytes that it names, and its numbers."""

import base64
import io
import math
import re
import stat
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from qwen3_omni_neuron.errors import InputError, printable

Source = str | Path | bytes
FILES = (str, Path, bytes, bytearray)
"""Types of a file in an item, as opposed to samples and pixels."""
Warn = Callable[[str], object]
"""Function that gets a sentence about a file that is used otherwise than its caller may expect.

It begins with the item's name, and says what was found and what of it is used.
"""
_SCHEME = re.compile(r"(data):|([a-z][a-z0-9+.-]*)://", re.ASCII | re.IGNORECASE)
_NAME_CHARACTERS = 200  # most that an error shows: the string may be a whole file in base64


def ignore(*_: object) -> None:
    """Drop a warning, or accept what is checked: the default."""


def source_of(value: Any, where: str, error: type[InputError]) -> Source | None:
    """Return the file or the bytes that the value of a media item names; None if it names neither.

    A string is a path, or a URL: file:// of this machine, with percent escapes, or data: in base64,
    of which the bytes are returned. Nothing is fetched. where: name of the item in errors.
    Raises `error` for any other URL.
    """
    if isinstance(value, bytearray):
        return bytes(value)  # copied here, once: io.BytesIO copies one whenever it is opened
    if not isinstance(value, str):
        return value if isinstance(value, Path | bytes) else None
    found = _SCHEME.match(value)
    if found is None:
        return value
    scheme = (found[1] or found[2]).lower()
    if scheme == "data":
        return _of_data_url(value, where, error)
    if scheme != "file":
        raise error(
            f"{where}: {name_of(value)} is a URL, and nothing is fetched here. Download it and "
            "give its path or its bytes; or ask a server that was started with --allow-media-host."
        )
    host, _, path = value[found.end() :].partition("/")
    if host.lower() not in ("", "localhost"):
        raise error(
            f"{where}: {name_of(value)} is of the host {printable(host, _NAME_CHARACTERS)}. A file "
            "of this machine is file:///PATH with the whole path, or a path without file://."
        )
    return "/" + unquote(path, errors="surrogateescape")


def _of_data_url(url: str, where: str, error: type[InputError]) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise error(f"{where} has a data URL that is not of the form data:TYPE;base64,CONTENT.")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as reason:  # a binascii.Error is one
        raise error(
            f"{where} has a data URL whose content is not base64 ({reason}). Encode the file's "
            "bytes in one piece."
        ) from reason


def name_of(source: Source) -> str:
    """Return the name of a source for errors: its path, or its number of bytes."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return printable(str(source), _NAME_CHARACTERS)


def open_media(source: Source, where: str, error: type[InputError]) -> BinaryIO:
    """Open the source for reading; the caller closes it.

    where: name of the item in errors.
    Raises `error` when the source does not exist, is a folder, a pipe or a device, or is empty.
    """
    if isinstance(source, bytes):
        if not source:
            raise error(f"{where} is empty: 0 bytes.")
        return io.BytesIO(source)
    name = name_of(source)
    try:
        status = Path(source).stat()
    except FileNotFoundError:
        raise error(f"{where}: {name} does not exist.") from None
    except OSError as reason:  # such as a name that is too long, which str(reason) would repeat
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason
    except ValueError as reason:  # a zero byte in the name
        raise error(f"{where}: {name} can't be opened ({reason}).") from reason
    if not stat.S_ISREG(status.st_mode):  # reading a pipe might never end
        raise error(f"{where}: {name} is not a file.")
    if not status.st_size:
        raise error(f"{where}: {name} is empty: 0 bytes.")
    try:
        return Path(source).open("rb")
    except OSError as reason:
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason


def real_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else: a bool, NaN, one too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):  # numpy counts a timedelta64 as a number, too
        return None
    return number if math.isfinite(number) else None


def whole_number(value: Any) -> int | None:
    """Return an integer of any size, and None for anything else: a bool, 2.0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):  # a timedelta64
        return None
