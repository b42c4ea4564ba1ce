"""Return of freed memory, which malloc keeps, to the system."""

import ctypes
import time
from collections.abc import Callable
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


def resident_mb() -> int | None:
    """Return the memory of this process in MB, None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    return round(found[0] * 1024 / _MB) if found else None


class IdleMemory:
    """Returns memory that malloc kept from earlier work, while a process is idle.

    resident, free, now: `resident_mb`, `give_back` and a clock in seconds.
    """

    def __init__(
        self,
        resident: Callable[[], int | None] = resident_mb,
        free: Callable[[], None] = give_back,
        now: Callable[[], float] = time.monotonic,
    ):
        self._resident, self._free, self._now = resident, free, now
        self._next_s = 0.0
        self._kept_mb = 0

    def look(self) -> None:
        """Give memory back if there is more of it than after the last time.

        To be called while the process is idle, at any rate: it checks every LOOK_S.
        """
        if self._now() < self._next_s:
            return
        self._next_s = self._now() + LOOK_S
        held_mb = self._resident()
        if held_mb is None:
            return
        self._kept_mb = min(self._kept_mb, held_mb)
        if held_mb < self._kept_mb + GROWN_MB:
            return
        self._free()
        self._kept_mb = self._resident() or held_mb


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
