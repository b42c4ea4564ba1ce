"""What a process that ended has left to say."""

import os
import signal
import tempfile
from typing import BinaryIO

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
