"""Memory that malloc keeps after it was freed, and how it goes back to the system."""

import ctypes
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LOOK_S = 5.0  # between two looks at an idle process
GROWN_MB = 8  # less is not worth a look through malloc's arenas
_MB = 1e6
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def trim_early() -> None:
    """Have this process's arenas give memory at their ends back once it is more than 2 MiB.

    For a process of our own, before it has many threads. Otherwise glibc raises its limit to twice
    the largest tensor that was freed, up to 64 MiB for each of eight arenas a core, and `give_back`
    does not look at their ends: 96 chats with pictures of three megapixels leave 350 MB, and 20 MB
    with this. Tensors of up to 32 MiB are taken from arenas, whose pages are there already.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and _malloc_trim() is not None:
        mallopt(_M_TRIM_THRESHOLD, 2 << 20)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def give_back() -> None:
    """Give freed memory back to the system. Does nothing where malloc is not glibc's.

    glibc has up to eight arenas a core, and a thread takes from one of them. What is freed in the
    middle of an arena stays with the process: 30 models loaded and closed, each in a thread of its
    own, leave up to 90 MB. Takes 1 to 20 ms, in which other threads go on, but for those that need
    the arena that is being looked through. What is needed again costs page faults: 1 ms of the next
    reply.
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
    """Gives back what malloc keeps of the work before, while a process has nothing to do.

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
        """Give memory back where there is more of it than after the last time.

        To be called while the process is idle, as often as one likes: it looks every LOOK_S.
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
