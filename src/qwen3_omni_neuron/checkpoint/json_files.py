"""Read text and JSON files of a checkpoint or of a compiled tree."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from qwen3_omni_neuron.errors import CheckpointError, format_value, printable

MOST_REASON = 300  # characters quoted from another library's message


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe, which might block."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe would wait for its writer

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
    """Read a UTF-8 file. Raises OSError and ValueError."""
    return read_bytes(path).decode()


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError and ValueError."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None


def reason(error: BaseException) -> str:
    """Return an error's message, shortened and printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = printable(str(error), MOST_REASON)
    return f"it has no {text}" if isinstance(error, KeyError) else text or type(error).__name__


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """Read the image processor's and feature extractor's settings. Raises CheckpointError."""
    path = folder / "preprocessor_config.json"
    try:
        settings = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no preprocessor_config.json. Download it.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no usable preprocessor_config.json: {reason(error)}. Download it again."
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{folder} has no usable preprocessor_config.json: it contains a "
            f"{type(settings).__name__}, not an object. Download it again."
        )
    return settings


def whole_setting(settings: dict[str, Any], name: str, default: int, most: int) -> int:
    """Return an integer setting from 1 to `most`. Raises CheckpointError."""
    value = settings.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(
            f"preprocessor_config.json has {name} {format_value(value)}; it must be an integer "
            f"from 1 to {most}."
        )
    return value


def check_served(settings: dict[str, Any], served: dict[str, Any]) -> None:
    """Raise CheckpointError if a setting differs from its only supported value."""
    for name, only in served.items():
        value = settings.get(name, only)
        if value != only:
            raise CheckpointError(
                f"preprocessor_config.json has {name} {format_value(value)}; only {only!r} is "
                "supported."
            )
