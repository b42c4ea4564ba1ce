"""Pauses in the reading of a prompt, at which it may yield or end."""

from collections.abc import Callable
from contextvars import ContextVar

PAUSE: ContextVar[Callable[[], None] | None] = ContextVar("PAUSE", default=None)
"""A reader's function for its pauses, or None."""


def pause() -> None:
    """Yield to others if this thread's reader does so. May raise to end the work."""
    call = PAUSE.get()
    if call is not None:
        call()
