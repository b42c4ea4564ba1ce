"""An engine for several processes that make calls together."""

import os
import signal
import time

import torch
from torch import Tensor


class FakeRank:
    """number: of the rank. refuses: the number of the one that can't be built."""

    def __init__(self, number: int, refuses: int = -1):
        if number == refuses:
            raise ValueError(f"rank {number} was not built")
        if refuses >= 0:
            time.sleep(60)  # waits for the one that was not built
        self._number = number

    def total(self, x: Tensor) -> tuple[int, float]:
        return self._number, float(x.sum())

    def fail(self, only: int = -1) -> None:
        if only in (-1, self._number):
            raise ValueError(f"no {self._number}")

    def fail_or_wait(self, failing: int) -> None:
        self.fail(failing)
        time.sleep(60)

    def end(self, ending: int, number: int) -> None:
        """One ends itself by a signal, and the others wait for it."""
        if self._number == ending:
            os.kill(os.getpid(), number)
        time.sleep(60)

    def hang(self, hanging: int) -> None:
        if self._number == hanging:
            time.sleep(60)

    def close(self) -> None:
        return None


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
BIG = torch.ones(200_000)
