"""Headers of safetensors files: type, shape and place of every tensor, without its values."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qwen3_omni_neuron.errors import CheckpointError

LENGTH_BYTES = 8  # a header begins with its length, a number of so many bytes
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
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


def header_bytes(file: BinaryIO) -> bytes:
    """Read the header at the start of a file. Raises ValueError if it is no safetensors file."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{Path(file.name).name} is no safetensors file")
    return file.read(length)


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Read the headers of some files of a folder. Returns their tensors by name.

    Raises CheckpointError for a file that is missing or can't be read.
    """
    found: dict[str, StoredTensor] = {}
    for path in (folder / name for name in sorted(files)):
        try:
            with path.open("rb") as file:
                header = header_bytes(file)
            for name, stored in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = (LENGTH_BYTES + len(header) + at for at in stored["data_offsets"])
                    shape = tuple(stored["shape"])
                    found[name] = StoredTensor(path, stored["dtype"], shape, begin, end)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} can't be read ({error!r}): it is truncated or broken. Download it again."
            ) from error
    return found


def read_integers(stored: StoredTensor) -> tuple[int, ...]:
    """Read a small tensor of integers. Raises ValueError for another type, and OSError."""
    if stored.dtype not in _INTEGERS:
        raise ValueError(f"{stored.dtype} is no type of integers")
    size = _INTEGERS[stored.dtype]
    with stored.path.open("rb") as file:
        content = os.pread(file.fileno(), stored.bytes, stored.begin)
    starts = range(0, len(content), size)
    return tuple(int.from_bytes(content[at : at + size], "little", signed=True) for at in starts)
