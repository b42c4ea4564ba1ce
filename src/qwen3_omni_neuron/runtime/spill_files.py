"""Files of spilled rows: one for each block, in a folder of this process alone.

What a block's rows were computed from is known only to this process, so its files end with it: they
are deleted when the model is closed, and those of a process that was killed when the next one
starts. The rows hold what callers said: only this user may read the files.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.errors import OutputError
from qwen3_omni_neuron.untrusted_files import open_regular

_PREFIX = "rows-"  # of each process's folder


class DamagedFileError(Exception):
    """A file has other bytes than were written."""


@dataclass(frozen=True)
class StoredTensors:
    """A file of tensors, and what it must have.

    sha256: digest of all bytes. kinds: shape and dtype of each tensor.
    """

    path: Path
    size: int
    sha256: bytes
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]


class SpillFiles:
    """Files of tensors in a folder of this process, below one that processes may share.

    Several threads may call it, for different files.
    """

    def __init__(self, folder: Path):
        """Make this process's folder, and delete those of processes that have ended.

        Raises OutputError.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shared = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(shared, fcntl.LOCK_EX)  # until the new folder is locked
                for left in folder.glob(f"{_PREFIX}*"):
                    _delete_unlocked(left)
                self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
                self._lock = os.open(self._folder, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            finally:
                os.close(shared)
        except OSError as error:
            raise OutputError(
                f"spill_folder {folder} can't be used: {error}. Name a folder on a local disk that "
                "this user may write to."
            ) from error
        self._files = 0

    def write(self, tensors: Sequence[Tensor]) -> StoredTensors:
        """Write contiguous tensors into a new file. Raises OSError, and leaves no file then."""
        self._files += 1
        path, digest, size = self._folder / str(self._files), hashlib.sha256(), 0
        try:
            with open(path, "xb", opener=_private) as file:
                for tensor in tensors:
                    contents = tensor.view(torch.uint8).numpy().data
                    digest.update(contents)
                    size += file.write(contents)
        except OSError:
            _unlink(path)
            raise
        kinds = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        return StoredTensors(path, size, digest.digest(), kinds)

    def read(self, stored: StoredTensors) -> list[Tensor]:
        """Read the tensors of a file. Raises OSError, and DamagedFileError."""
        with open_regular(stored.path) as file:
            contents = np.fromfile(file, np.uint8, stored.size + 1)
        if len(contents) != stored.size or hashlib.sha256(contents.data).digest() != stored.sha256:
            raise DamagedFileError(f"{stored.path} has other bytes than were written")
        tensors, start = [], 0
        for shape, dtype in stored.kinds:
            stop = start + shape.numel() * dtype.itemsize
            tensors.append(torch.from_numpy(contents[start:stop]).view(dtype).view(shape))
            start = stop
        return tensors

    def delete(self, stored: StoredTensors) -> None:
        """Delete a file, if it is there."""
        _unlink(stored.path)

    def close(self) -> None:
        """Delete all files and the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _delete_unlocked(folder: Path) -> None:
    """Delete a folder of this module unless its process still runs."""
    try:
        # Not to wait for the writer of a pipe that anyone has put there.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # another user's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
