"""Headers of safetensors files: type, shape and place of every tensor, without its values.

And the index, which names the file of each tensor.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qwen3_omni_neuron.checkpoint.json_files import (
    open_regular,
    parse_json,
    read_bytes,
    reason,
)
from qwen3_omni_neuron.errors import CheckpointError, format_value

INDEX_FILE = "model.safetensors.index.json"
_MOST_BYTES = 1 << 24  # of a header; an index of 28,000 tensors has 3 MB
LENGTH_BYTES = 8  # a header begins with its length, a number of so many bytes
_MOST_AXES, _MOST_FILE_NAME = 8, 256
_INTEGERS = {"I32": 4, "I64": 8}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. dtype: safetensors' name of it; begin, end: its bytes in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


def header_length(beginning: bytes) -> int:
    """Return a header's length, from a file's first LENGTH_BYTES.

    Raises ValueError if it is not a safetensors file.
    """
    length = int.from_bytes(beginning, "little")
    if len(beginning) < LENGTH_BYTES or length > _MOST_BYTES:
        raise ValueError("it is not a safetensors file")
    return length


def header_bytes(file: BinaryIO) -> bytes:
    """Read the header at the start of a file. Raises ValueError, see header_length."""
    length = header_length(file.read(LENGTH_BYTES))
    header = file.read(length)
    if len(header) < length:
        raise ValueError(f"its header has {len(header)} of {length} bytes")
    return header


def parse_header(header: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Parse a header. Returns type, shape, begin and end of each tensor; 0 is the header's end.

    Raises ValueError.
    """
    raw = parse_json(header)
    if not isinstance(raw, dict):
        raise ValueError("its header is not an object")
    raw.pop("__metadata__", None)
    return {name: _parsed(name, stored) for name, stored in raw.items()}


def _parsed(name: str, stored: Any) -> tuple[str, tuple[int, ...], int, int]:
    match stored:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            whole = all(type(side) is int and 0 <= side < 1 << 63 for side in shape)
            if whole and len(shape) <= _MOST_AXES and 0 <= begin <= end < 1 << 63:
                return dtype, tuple(shape), begin, end
    raise ValueError(f"its header has {format_value(stored)} for {format_value(name)}")


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Read the headers of some files of a folder. Returns their tensors by name.

    Raises CheckpointError for a file that is missing or can't be read, or does not end with its
    last tensor.
    """
    found: dict[str, StoredTensor] = {}
    for path in (folder / name for name in sorted(files)):
        try:
            with open_regular(path) as file:
                header, size = header_bytes(file), os.fstat(file.fileno()).st_size
            start = LENGTH_BYTES + len(header)
            tensors = parse_header(header)
            stated = start + max((end for _, _, _, end in tensors.values()), default=0)
            if stated != size:  # also before it is mapped into memory
                raise ValueError(f"it has {size} bytes, and its header says {stated}")
            for name, (dtype, shape, begin, end) in tensors.items():
                found[name] = StoredTensor(path, dtype, shape, start + begin, start + end)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} can't be read ({reason(error)}): it is truncated or broken. Download it "
                "again."
            ) from error
    return found


def read_index(folder: Path) -> dict[str, str] | None:
    """Read the name of each tensor's file, which is in the same folder; None without an index.

    Raises CheckpointError for an index that can't be read.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        return parse_index(read_bytes(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read: {reason(error)}. Download it again."
        ) from error


def parse_index(content: bytes) -> dict[str, str]:
    """Parse an index; see read_index. Raises ValueError, also for a file in another folder."""
    raw = parse_json(content)
    files = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it has no weight_map")
    if others := [file for file in files.values() if not isinstance(file, str)]:
        raise ValueError(f"its weight_map has {format_value(others[0])} for a file's name")
    for file in set(files.values()):
        known = 0 < len(file) < _MOST_FILE_NAME and file.isprintable()
        if not known or file in (".", "..") or "/" in file:
            raise ValueError(f"its weight_map has {format_value(file)}, no file in its folder")
    return files


def read_integers(stored: StoredTensor) -> tuple[int, ...]:
    """Read a small tensor of integers. Raises ValueError for another type, and OSError."""
    if stored.dtype not in _INTEGERS:
        raise ValueError(f"{stored.dtype} is not a type of integers")
    size = _INTEGERS[stored.dtype]
    with open_regular(stored.path) as file:
        content = os.pread(file.fileno(), stored.bytes, stored.begin)
    starts = range(0, len(content), size)
    return tuple(int.from_bytes(content[at : at + size], "little", signed=True) for at in starts)
