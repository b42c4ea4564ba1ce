"""Pauses in long reading of a prompt: places at which it may wait for others, or end."""

from collections.abc import Callable
from contextvars import ContextVar

PAUSE: ContextVar[Callable[[], None] | None] = ContextVar("PAUSE", default=None)
"""What a reader does at a pause, in its thread; None: nothing."""


def pause() -> None:
    """Let others go first, where the reader of this thread does so. May raise to end the work."""
    call = PAUSE.get()
    if call is not None:
        call()
