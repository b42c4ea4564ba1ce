"""Read small files that anyone may have written, such as those of a checkpoint from a hub.

Only regular files are read, as reading a pipe might never end, and only up to a size. A JSON text
is measured before it becomes objects: a parser makes 30 MB of `[],` into 10 million lists.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from qwen3_omni_neuron.errors import printable

MOST_BYTES = 1 << 24  # a released tokenizer.json has 11 MB, an index of 28,000 tensors 3 MB
MOST_VALUES = 1 << 20
MOST_DEPTH = 64  # nesting of lists and objects
MOST_REASON = 300  # characters of another library's message that an error quotes
_STRING = re.compile(rb'"[^"]*(?:"|\Z)')  # without escaped quotes in it
_INNERMOST = re.compile(rb"\[\]|\{\}")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; the caller closes it.

    Raises OSError, also for what is not a regular file, such as a pipe.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # or opening a pipe waits for its writer

    file = open(path, "rb", opener=opener)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file. Raises OSError, and ValueError for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        size = max(len(content), path.stat().st_size)
        raise ValueError(f"it has {size} bytes, and {most} is the most that is read")
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a file of UTF-8. Raises OSError and ValueError, see read_bytes."""
    return read_bytes(path, most).decode()


def read_json(path: Path) -> Any:
    """Read a file of JSON. Raises OSError and ValueError, see read_bytes and parse_json."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    """Parse a JSON text of at most MOST_BYTES.

    Raises ValueError for another text, one with too many or too deep values, a number that is not
    finite, and an object that has a key twice, of which readers take one or the other.
    """
    check_json(content)
    try:
        return json.loads(
            content.decode(),
            parse_float=_finite,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def check_json(content: bytes) -> None:
    """Raise ValueError for a JSON text that has too many or too deep values.

    Whether the text is JSON at all is for its parser to find.
    """
    values = max(sum(map(content.count, (b",", b"[", b"{"))), content.count(b'"') // 4)
    if values > MOST_VALUES:
        raise ValueError(f"it has {values} values, and {MOST_VALUES} is the most that is read")
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", content).translate(None, _NOT_BRACKETS)
    for _ in range(MOST_DEPTH):  # without the innermost lists and objects, each time
        if not brackets:
            return
        brackets = _INNERMOST.sub(b"", brackets)
    if brackets:
        raise ValueError(
            f"it has more than {MOST_DEPTH} lists and objects in each other, or some without an end"
        )


def reason(error: BaseException) -> str:
    """Return an error's message for quoting in another one: short and printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = printable(str(error), MOST_REASON)
    return f"it has no {text}" if isinstance(error, KeyError) else text or type(error).__name__


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text[:20]}, which is too large")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"it has the number {text}")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has {printable(twice, 100)} twice in one object")
    return found
