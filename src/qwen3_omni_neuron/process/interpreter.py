"""A new interpreter that runs one function of this package.

A plain one, not multiprocessing's: that would import the script that is run once more, and has no
environment of its own to give.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from qwen3_omni_neuron.process.last_words import LastWords
from qwen3_omni_neuron.process.parent import end_with


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
