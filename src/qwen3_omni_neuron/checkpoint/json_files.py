"""Read text and JSON files of a checkpoint or of a compiled tree."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from qwen3_omni_neuron.errors import printable

MOST_REASON = 300  # characters of another library's message that an error quotes


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; the caller closes it.

    Raises OSError, also for what is not a regular file: reading a pipe might never end.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # or opening a pipe waits for its writer

    file = open(path, "rb", opener=opener)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def read_bytes(path: Path) -> bytes:
    """Read a file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a file of UTF-8. Raises OSError and ValueError."""
    return read_bytes(path).decode()


def read_json(path: Path) -> Any:
    """Read a file of JSON. Raises OSError and ValueError."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    """Parse a JSON text. Raises ValueError for any other text."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None


def reason(error: BaseException) -> str:
    """Return an error's message for quoting in another one: short and printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = printable(str(error), MOST_REASON)
    return f"it has no {text}" if isinstance(error, KeyError) else text or type(error).__name__
