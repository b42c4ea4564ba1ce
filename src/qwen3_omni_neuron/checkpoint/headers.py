"""Headers of safetensors files, and the index of shards."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qwen3_omni_neuron.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8  # size of a header's length, which precedes it
_INTEGERS = {"I32": 4, "I64": 8}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. dtype: safetensors' name; begin, end: its bytes in the file."""

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
    """Read a file's header. Raises ValueError if truncated."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    size = os.fstat(file.fileno()).st_size
    if length + LENGTH_BYTES > size:
        raise ValueError(f"it has {size} bytes, and its header alone needs {length}")
    return file.read(length)


def parse_header(header: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return each tensor's type, shape, begin and end (after the header). Raises ValueError."""
    raw = json.loads(header)
    raw.pop("__metadata__", None)
    return {
        name: (stored["dtype"], tuple(stored["shape"]), *stored["data_offsets"])
        for name, stored in raw.items()
    }


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Read the headers of a folder's files. Returns their tensors by name.

    Raises CheckpointError for an unreadable file, or one whose length is not its tensors'.
    """
    found: dict[str, StoredTensor] = {}
    for path in (folder / name for name in sorted(files)):
        try:
            with path.open("rb") as file:
                header, size = header_bytes(file), os.fstat(file.fileno()).st_size
            start = LENGTH_BYTES + len(header)
            tensors = parse_header(header)
            stated = start + max((end for _, _, _, end in tensors.values()), default=0)
            if stated != size:  # checked before it is mapped
                raise ValueError(f"it has {size} bytes, but its header describes {stated}")
            for name, (dtype, shape, begin, end) in tensors.items():
                found[name] = StoredTensor(path, dtype, shape, start + begin, start + end)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} can't be read ({error}): it is truncated or broken. Download it again."
            ) from error
    return found


def read_index(folder: Path) -> dict[str, str] | None:
    """Return each tensor's file name; None without an index. Raises CheckpointError."""
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}. Download it again.") from error


def read_integers(stored: StoredTensor) -> tuple[int, ...]:
    """Read a small int32 or int64 tensor."""
    size = _INTEGERS[stored.dtype]
    with stored.path.open("rb") as file:
        content = os.pread(file.fileno(), stored.bytes, stored.begin)
    starts = range(0, len(content), size)
    return tuple(int.from_bytes(content[at : at + size], "little", signed=True) for at in starts)
