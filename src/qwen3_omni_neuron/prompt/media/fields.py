"""Fields of a media item: the file or bytes that it names, and its numbers."""

import io
import math
import stat
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from qwen3_omni_neuron.errors import InputError, printable

Source = str | Path | bytes | bytearray
Warn = Callable[[str], object]
"""Function that gets a sentence about a file that is used otherwise than its caller may expect.

It begins with the item's name, and says what was found and what of it is used.
"""
_NAME_CHARACTERS = 200  # most that an error shows: the string may be a whole file in base64


def ignore(warning: str) -> None:
    """Drop a warning: the default."""


def name_of(source: Source) -> str:
    """Return the name of a source for errors: its path, or its number of bytes."""
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes"
    return printable(str(source), _NAME_CHARACTERS)


def open_media(source: Source, where: str, error: type[InputError]) -> BinaryIO:
    """Open the source for reading; the caller closes it.

    where: name of the item in errors.
    Raises `error` when the source does not exist, is a folder, a pipe or a device, or is empty.
    """
    if isinstance(source, bytes | bytearray):
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
