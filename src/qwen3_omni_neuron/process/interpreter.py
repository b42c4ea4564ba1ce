"""A new interpreter that runs one function of this package.

A plain one, not multiprocessing's: that would import the script that is run once more, and has no
environment of its own to give.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

PARENT_CHECK_S = 0.25


def end_with(parent: int) -> None:
    """Leave when the process of that id, which started this one, ends in any way, also out of the
    middle of a call. Returns at once."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


TAIL_BYTES = 8192  # faulthandler's dump of a few threads


class LastWords:
    """A temporary file without a name that takes a process's stdout and stderr."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, kept

    def tail(self) -> str:
        """The end of what was written, at most TAIL_BYTES of it."""
        # Read at a position: moving the file's own would move where the process writes.
        descriptor = self.file.fileno()
        begin = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
        return os.pread(descriptor, TAIL_BYTES, begin).decode(errors="replace").strip()

    def close(self) -> None:
        self.file.close()


def exit_words(status: int | None) -> str:
    """How a process ended, by the return code that subprocess gives; None: it had to be killed."""
    if status is None:
        return "hung up, and was killed"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    if name == "SIGKILL":
        name += " (out of memory, where nobody sent it)"
    return f"was ended by {name}"


def start_interpreter(
    module: str,
    descriptors: Sequence[int],
    last_words: LastWords,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start `main(*descriptors, parent)` of a module, which calls `obey_parent` before anything
    else.

    descriptors: open files that it gets, under the same numbers. last_words: takes what it prints.
    env: variables to add to this process's, there before anything is imported. options: of Popen.
    Raises OSError where it can't be started.
    """
    code = (
        f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}; "
        f"from {module} import main; main(*{tuple(descriptors)}, parent={os.getpid()})"
    )
    # Blocked in the new process, too, until it ignores it.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", "-c", code],
            stdout=last_words.file,
            stderr=last_words.file,
            pass_fds=tuple(descriptors),
            env={**os.environ, **(env or {})},
            **options,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def obey_parent(parent: int) -> None:
    """Leave Ctrl-C, which reaches every process of the terminal, to the parent, and end with it.

    The signal is blocked by the parent until here, so that it does no harm while importing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with(parent)
