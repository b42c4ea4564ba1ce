"""This machine's memory, and the pages of mapped files."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

CONTAINER_LIMITS = tuple(  # files of cgroups of version 2 and 1
    Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")
)
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
_PIECE_BYTES = 64 << 20  # signals wait for a call: 0.1 to 0.5 s on a disk


def memory_bytes() -> int:
    """Return this machine's memory, or its container's limit if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [file.read_text(encoding="ascii") for file in CONTAINER_LIMITS if file.exists()]
    return min([total, *(int(text) for text in texts if text.strip() != "max")])


def map_pages(tensors: Sequence[Tensor]) -> None:
    """Read a mapped file's tensors in order, and map their pages into this process.

    Otherwise pages are read on first use, at half the disk's speed, while a reply waits, and Linux
    evicts unmapped pages first. Does nothing for more bytes than memory, or without the syscall.
    """
    spans = [(t.data_ptr(), t.nbytes) for t in tensors if t.nbytes]
    if not hasattr(mmap, "MADV_HUGEPAGE") or sum(n for _, n in spans) > memory_bytes():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    ranges = [(start - start % mmap.PAGESIZE, start + nbytes) for start, nbytes in spans]
    for start, end in ranges:  # a 2 MB page can have several
        advise(start, end - start, mmap.MADV_HUGEPAGE)
    for start, end in ranges:
        for piece in range(start, end, _PIECE_BYTES):
            advise(piece, min(_PIECE_BYTES, end - piece), POPULATE_READ)
