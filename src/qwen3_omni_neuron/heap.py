"""Memory that malloc keeps after it was freed, and how it goes back to the system."""

import ctypes
from functools import cache
from typing import Any


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


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
