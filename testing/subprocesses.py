"""Python in a process of its own; processes and open files, as Linux shows them; waits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_python(*arguments: object, timeout_s: float = 300) -> str:
    """Run Python on one thread, with the import path of this process, and return its stdout.

    Raises AssertionError with the end of its stderr where it fails.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def wait_until(holds: Callable[[], Any], seconds: float = 60.0, every_s: float = 0.005) -> Any:
    """Wait until a function returns something true, and return that.

    Raises AssertionError after some seconds: many, for a machine that does other things.
    """
    end_s = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end_s, "it did not come to hold"
        time.sleep(every_s)
    return found


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, apart from those that have ended."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found.append(int(path.name))
    return found


def lives(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files(pid: int | str | None = "self") -> set[str]:
    """Return the numbers of a process's open files; for this process, one is this call's own."""
    return {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}
