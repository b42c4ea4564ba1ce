"""Memory that two processes see, and that grows."""

import mmap
import os
import sys
import tempfile
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

FIRST_BYTES = 1 << 20


class SharedBlock:
    """The bytes of a file that has no name, mapped by whoever holds its descriptor.

    A file without a name needs no one to unlink it: the kernel frees it with its last holder,
    however that ends. And it can grow in place, which a multiprocessing.shared_memory block can't.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = self._map()

    @classmethod
    def create(cls) -> "SharedBlock":
        """A new one of FIRST_BYTES."""
        if sys.platform == "linux":
            # Not in /dev/shm, which a container often limits to 64 MiB.
            file = os.fdopen(os.memfd_create("qwen3-omni"), "r+b", buffering=0)
        else:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, it is kept
        os.ftruncate(file.fileno(), FIRST_BYTES)
        return cls(file)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> "SharedBlock":
        """The one that another process created, by a descriptor inherited from it."""
        return cls(os.fdopen(descriptor, "r+b", buffering=0))

    def at_least(self, size: int) -> NDArray[np.uint8]:
        """The block's bytes, `size` of them or more: it grows first where it is smaller.

        The array is no longer the block after a call that asks for more.
        """
        if size > len(self._bytes):
            if size > os.fstat(self.fileno()).st_size:  # else the other process has grown it
                os.ftruncate(self.fileno(), max(size, 2 * len(self._bytes)))
            self._bytes = self._map()
        return self._bytes

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._file.close()

    def _map(self) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.uint8)
