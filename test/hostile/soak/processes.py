"""A server's process and its children, read from outside: what they hold, and which are stages."""

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from testing.command_line import InputError, Row

PROC = Path("/proc")
STAGE = "qwen3_omni_neuron.engines.process.server"  # in the command line of a stage's process
ENDS_S = 10.0

Process = tuple[int, str]
"""A process's id and start time, because ids are reused."""


def measured(pid: int) -> Row:
    """Return the resources that a process and its descendants hold.

    memory_mb: memory of all together, with shared memory counted once; server_mb: resident memory
    of the first alone; the descendants' numbers are in `children`.
    Raises InputError where the process has ended.
    """
    processes = [(pid, ""), *descendants(pid)]
    try:
        return {
            "memory_mb": sum(_kilobytes(one, "smaps_rollup", "Pss") for one, _ in processes) / 1024,
            "server_mb": _kilobytes(pid, "status", "VmRSS") / 1024,
            "threads": sum(_kilobytes(one, "status", "Threads") for one, _ in processes),
            "open_files": sum(len(os.listdir(PROC / str(one) / "fd")) for one, _ in processes),  # noqa: PTH208
            "children": len(processes) - 1,
        }
    except OSError as error:
        raise InputError(f"the server's processes can't be read: {error}.") from error


def descendants(pid: int) -> list[Process]:
    """Return a process's descendants, in the order of their ids."""
    parents = {}
    for file in PROC.glob("[0-9]*/stat"):
        if fields := _fields(file):
            parents[int(file.parent.name), fields[19]] = int(fields[1])
    found, above = list[Process](), {pid}
    while above:
        next_ones = [one for one, parent in parents.items() if parent in above]
        found += next_ones
        above = {one for one, _ in next_ones}
    return sorted(found)


def stages(pid: int) -> list[int]:
    """Return the ids of a server's stage processes, in the order in which they were started."""
    return [one for one, _ in descendants(pid) if STAGE in _text(PROC / str(one) / "cmdline")]


def kill(pid: int) -> None:
    """Kill a stage's process."""
    os.kill(pid, signal.SIGKILL)


def left_of(processes: Collection[Process]) -> list[Process]:
    """Return the processes that have not ended after at most ten seconds."""
    end_s = time.monotonic() + ENDS_S
    while True:
        left = [one for one in processes if _runs(*one)]
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.1)


def _runs(pid: int, started: str) -> bool:
    fields = _fields(PROC / str(pid) / "stat")
    return bool(fields) and fields[19] == started and fields[0] != "Z"


def _fields(file: Path) -> list[str]:
    """Return the fields of a process's `stat` from its state on; none if it has ended.

    "PID (NAME) STATE PARENT ...", and a name may have brackets.
    """
    return _text(file).rpartition(")")[2].split()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kilobytes(pid: int, file: str, name: str) -> int:
    """Return the number of a line such as "VmRSS:   12345 kB"."""
    text = (PROC / str(pid) / file).read_text(encoding="utf-8")
    return int(text.split(f"\n{name}:")[1].split()[0])
