"""Child processes: start, end with the parent, output, exceptions, shared files."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

PARENT_CHECK_S = 0.25
MOST_OUTPUT_BYTES = 1 << 20  # upper bound of a child's output file
TAIL_BYTES = 8192  # enough for faulthandler's dump of a few threads
_HELD = (signal.SIGINT, signal.SIGTERM)  # must not interrupt a start or imports
# A terminal sends these to the whole process group; the server still finishes its requests.
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_START_S = 1.0  # longest wait for another thread's start of a child
_starting = threading.Lock()
_started: "list[subprocess.Popen[bytes]]" = []  # running children; guarded by _starting


class OutputTail:
    """Temporary file for a child's stdout and stderr."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, kept
        self.close = self.file.close

    def read(self) -> str:
        """Return the last TAIL_BYTES of the output."""
        # read would move the child's write position.
        descriptor = self.file.fileno()
        begin = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
        return os.pread(descriptor, TAIL_BYTES, begin).decode(errors="replace").strip()


def start_child(
    module: str,
    descriptors: Sequence[int],
    output: OutputTail,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start `main(*descriptors, parent)` of a module, which must call `follow_parent` first.

    descriptors: open files that the child inherits with the same numbers. output: receives stdout
    and stderr. env: default: this process's. options: Popen's. Raises OSError.
    """
    code = (
        f"import sys; sys.path[:] = {[str(p) for p in sys.path]!r}; "
        f"from {module} import main; main(*{tuple(descriptors)}, parent={os.getpid()})"
    )
    # The child inherits the blocked signals, until `take_signals`.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        with _starting:
            process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-c", code],
                stdout=output.file,
                stderr=output.file,
                pass_fds=tuple(descriptors),
                env=env,
                **options,
            )
            _started[:] = [*(child for child in _started if child.returncode is None), process]
            return process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def kill_children() -> None:
    """Kill all children and their sessions, and let none start: this process ends."""
    _starting.acquire(timeout=_START_S)
    for child in _started:
        if child.poll() is None:
            with suppress(OSError):
                own = os.getsid(child.pid) == child.pid
                (os.killpg if own else os.kill)(child.pid, signal.SIGKILL)


def describe_exit(status: int | None) -> str:
    """Return how a process ended. status: see Popen.returncode; None: it was killed."""
    if status is None:
        return "closed its connection, but did not end, and was killed"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    if name == "SIGKILL":
        name += " (probably out of memory)"
    return f"was ended by {name}"


def follow_parent(parent: int) -> None:
    """Make this child ignore Ctrl-C and end with its parent, even during a call.

    A child with its own session also ends its processes. parent: process id.
    """
    take_signals()
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def take_signals() -> None:
    """Make this child ignore a terminal's signals, and unblock its parent's blocked ones."""
    for number in _OF_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def trim_output() -> None:
    """Cut a long output of this process, a file of `start_child`, to its end."""
    size = os.fstat(2).st_size
    if size > MOST_OUTPUT_BYTES // 2:
        tail = os.pread(2, TAIL_BYTES, size - TAIL_BYTES)
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        os.write(2, tail)


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class EngineTracebackError(Exception):
    """Text of a traceback in the engine's process: the `__cause__` here."""


class SentException:
    """An exception to send; a RuntimeError if it can't be pickled."""

    def __init__(self, error: Exception) -> None:
        self._text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
            self._error = error
        except Exception:
            summary = "".join(traceback.format_exception_only(error)).strip()
            self._error = RuntimeError(
                f"the engine's process raised an exception that can't be pickled: {summary}"
            )

    def exception(self) -> Exception:
        """Return the exception, with its process's traceback as `__cause__`."""
        self._error.__cause__ = EngineTracebackError(f"\n{self._text}")
        return self._error


def nameless_file() -> BinaryIO:
    """Return a new unnamed unbuffered file to share; on Linux, memory that may be sealed."""
    if sys.platform != "linux":
        return tempfile.TemporaryFile(buffering=0)
    # Containers often limit /dev/shm to 64 MiB.
    descriptor = os.memfd_create("qwen3-omni", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return os.fdopen(descriptor, "r+b", buffering=0)
