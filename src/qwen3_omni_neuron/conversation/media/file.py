"""Opens the file, or the bytes of one, that an item of a message holds."""

import io
import stat
from pathlib import Path
from typing import BinaryIO

from qwen3_omni_neuron.errors import InputError

Source = str | Path | bytes | bytearray
_NAME_CHARACTERS = 200  # a file's bytes in base64 are a string too: not all of it in an error


def name_of(source: Source) -> str:
    """What an error calls a source: its path, or how many bytes it is."""
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes"
    name = str(source)
    return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."


def open_media(source: Source, where: str, error: type[InputError]) -> BinaryIO:
    """The source open for reading; the caller closes it.

    where: names the item in errors.
    Raises `error` when it does not exist, is a folder, a pipe or a device, or is empty.
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
    except OSError as reason:  # a name too long: not all of it again
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason
    except ValueError as reason:  # a zero byte in it
        raise error(f"{where}: {name} can't be opened ({reason}).") from reason
    if not stat.S_ISREG(status.st_mode):  # reading a pipe might never end
        raise error(f"{where}: {name} is not a file.")
    if not status.st_size:
        raise error(f"{where}: {name} is empty: 0 bytes.")
    try:
        return Path(source).open("rb")
    except OSError as reason:
        raise error(f"{where}: {name} can't be opened ({reason.strerror}).") from reason
