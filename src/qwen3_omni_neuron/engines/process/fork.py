"""Refusals in a child that os.fork created from a process with a loaded model.

The child lacks its parent's threads, torch's included, and other threads' locks stay locked.
Engines' processes and temporary folders are the parent's. So the child can't use or load a model,
and keeps its parent's processes and files when it exits.
"""

import _thread  # threading.RLock is a function, which has no subclass
import os
import weakref
from collections.abc import Callable
from typing import Any

from qwen3_omni_neuron.errors import ForkError


class _State:
    loader: int | None = None  # process that loaded a model: this one or an ancestor
    forked = False  # whether this process was forked after that


def note_load() -> None:
    """Record that this process loads a model. Raises ForkError if it can't."""
    check_not_forked()
    _State.loader = os.getpid()


def check_not_forked() -> None:
    """Raise ForkError if this process was forked after loading a model."""
    if _State.forked:
        raise ForkError(
            f"process {os.getpid()} was forked after process {_State.loader} had loaded a model. "
            "It can neither use nor load a model, because a fork copies no threads, neither the "
            "model's nor torch's. Start processes by spawn, as with "
            'multiprocessing.set_start_method("spawn"), or load in the children only, and no model '
            "before the fork."
        )


class OwnLock(_thread.RLock):  # type: ignore[misc]  # final in its stub alone
    """Reentrant lock of a model's process. Entering it in a forked child raises ForkError."""

    # `_note_fork` sets __enter__: a Python method would slow down every process.


def finalize(owner: object, end: Callable[..., object], *arguments: Any) -> weakref.finalize:
    """Return a weakref.finalize that calls `end`, except in forked children."""
    return weakref.finalize(owner, _call_in, os.getpid(), end, *arguments)


def _call_in(pid: int, end: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == pid:
        end(*arguments)


def _refuse(_: OwnLock) -> None:
    check_not_forked()


def _note_fork() -> None:
    if _State.loader is not None:
        _State.forked = True
        OwnLock.__enter__ = _refuse  # type: ignore[assignment]


os.register_at_fork(after_in_child=_note_fork)
