"""The progress of a process in its calls, in a file that it shares with its caller's process."""

from pathlib import Path

import numpy as np


class Progress:
    """Counts that one process writes and another one reads.

    Processes that make the same calls make the same steps in the same order, so all others wait for
    the process with the fewest steps. A compilation may take minutes.
    """

    def __init__(self, path: Path):
        """Open a file of counts, or make it."""
        if not path.exists():
            path.write_bytes(bytes(2 * np.dtype(np.int64).itemsize))
        self._counts = np.memmap(path, np.int64, "r+")

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return int(self._counts[0])

    @property
    def compilations(self) -> int:
        """The number of compilations so far, including one in progress."""
        return int(self._counts[1])

    def step(self) -> None:
        """Count a step."""
        self._counts[0] += 1

    def compiles(self) -> None:
        """Count a compilation that begins."""
        self._counts[1] += 1
