"""The end of a verb's process: by a signal, or with the verb's exit status."""

import _thread
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType, TracebackType
from typing import NoReturn

from qwen3_omni_neuron.engines.process.child import kill_children
from qwen3_omni_neuron.errors import ExitStatus

END_S = 10.0  # time for the verb to clean up after a signal
_STATUSES: Mapping[int, ExitStatus] = {
    signal.SIGTERM: ExitStatus.TERMINATED,
    signal.SIGINT: ExitStatus.INTERRUPTED,
}


class EndBySignal:
    """Block of a verb that SIGTERM or Ctrl-C ends, wherever it is.

    The first signal raises KeyboardInterrupt in the main thread, so that temporary files are
    removed and processes end; later ones are ignored. END_S after it the process is ended, whatever
    it does by then: the main thread may wait for one that is in a call without an end.
    status: the exit status of a process that got a signal, None without one.
    """

    def __init__(self, serves: bool):
        """serves: a signal is the usual end of the verb, with ExitStatus.OK."""
        self.status: int | None = None
        self._serves, self._raises = serves, True

    def __enter__(self) -> "EndBySignal":
        for number in _STATUSES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup or a shell's & sets it
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._raises = False

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.status is not None:
            return
        self.status = ExitStatus.OK if self._serves else _STATUSES[number]
        # A destructor or a callback that the exception meets would print it.
        sys.unraisablehook = lambda _: None
        # Not a threading.Thread: the main thread may hold the locks of that module.
        _thread.start_new_thread(_end_late, (self.status,))
        if self._raises:
            raise KeyboardInterrupt


def leave(status: int) -> NoReturn:
    """End the process and its child processes at once.

    Not as the interpreter ends: it waits for threads, which may be in calls without an end, and
    aborts where a daemon thread is in the code of a library such as torch.
    """
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    kill_children()
    os._exit(status)


def _end_late(status: int) -> None:
    time.sleep(END_S)
    kill_children()
    os._exit(status)


def open_standard_files() -> None:
    """Open the null device as stdin, stdout or stderr where one is closed.

    Otherwise a socket or a file of the verb gets its number, and whatever is printed. Bytes that
    are not UTF-8, as in names of files, are read and written as Python's command line has them.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            opened = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115, kept
            setattr(sys, name, opened)
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, TextIOWrapper):
            file.reconfigure(errors="surrogateescape")
