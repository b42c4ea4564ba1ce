"""Process memory: trimming malloc, freezing the garbage collector, counting page faults."""

import ctypes
import gc
import math
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

LOOK_S = 5.0  # interval between two checks of an idle process
GROWN_MB = 8  # smaller growth is not worth a search of malloc's arenas
_MB = 1e6
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h


def trim_early() -> None:
    """Make this process's arenas return memory at their ends once it is more than 2 MiB.

    To be called in a process of our own, before it has many threads. Otherwise glibc raises its
    limit to twice the largest tensor that was freed, up to 64 MiB for each of eight arenas a core,
    and `give_back` does not free their ends: 96 chats with images of three megapixels leave 350 MB,
    and 20 MB with this. Tensors of up to 32 MiB are allocated in arenas, whose pages are mapped
    already.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and _malloc_trim() is not None:
        mallopt(_M_TRIM_THRESHOLD, 2 << 20)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def give_back() -> None:
    """Give freed memory back to the system. Does nothing where malloc is not glibc's.

    glibc has up to eight arenas a core, and a thread allocates in one of them. Memory freed in the
    middle of an arena stays with the process: 30 models loaded and closed, each in a thread of its
    own, leave up to 90 MB. Takes 1 to 20 ms, in which only threads that need the arena being
    searched wait. Memory that is needed again costs page faults: 1 ms of the next reply.
    """
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


def keep_all() -> None:
    """Make the garbage collector ignore all objects that exist: those of modules and of a model.

    To be called once in a process of our own, after its model is loaded. Otherwise a full
    collection looks through 226,000 objects, and stops every thread for 0.1 s.
    """
    gc.collect()
    gc.freeze()


def resident_mb() -> int | None:
    """Return the memory of this process in MB, None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    return round(found[0] * 1024 / _MB) if found else None


def pages_read(pids: Iterable[int] = ()) -> int:
    """Return how often this process has waited for a page from the disk, such as of a mapped tree.

    pids: other processes whose waits count, too, where the system has /proc. Linux reads up to
    128 KiB at a time, and where pages are large 2 MiB.
    """
    found = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    for pid in pids:
        with suppress(OSError):  # it has ended, or there is no /proc
            found += int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
    return found


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int | None:
    """Return the memory that malloc has allocated and not freed; None without glibc's malloc.

    Unlike resident memory it doesn't depend on which freed pages malloc keeps.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def spare_mb() -> float | None:
    """Return the resident memory in MB that malloc has not allocated; None if it is not known.

    Apart from what malloc keeps it has constant parts, such as mapped libraries.
    """
    resident, allocated = resident_mb(), allocated_bytes()
    return None if resident is None or allocated is None else resident - allocated / _MB


class IdleMemory:
    """Returns memory that malloc kept from earlier work, while a process is idle.

    spare, free, now: `spare_mb`, `give_back` and a clock in seconds.
    """

    def __init__(
        self,
        spare: Callable[[], float | None] = spare_mb,
        free: Callable[[], None] = give_back,
        now: Callable[[], float] = time.monotonic,
    ):
        self._spare, self._free, self._now = spare, free, now
        self._next_s = 0.0
        self._least_mb = -math.inf

    def look(self) -> None:
        """Give memory back if there is more to spare than after the last time.

        To be called while the process is idle, at any rate: it checks every LOOK_S. Resident memory
        alone would not tell: it stays the same when a session that was open during the last check
        ends, and its sound is freed.
        """
        if self._now() < self._next_s:
            return
        self._next_s = self._now() + LOOK_S
        spare = self._spare()
        if spare is None:
            return
        self._least_mb = min(self._least_mb, spare)
        if spare < self._least_mb + GROWN_MB:
            return
        self._free()
        self._least_mb = self._spare() or spare


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
