"""An engine for several processes that make calls together."""

import os
import re
import signal
import time
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.process.engine_group import StepCounts


class FakeRank:
    """A rank's engine. progress: its file. refuses: number of the rank that can't be built."""

    fault = None

    def __init__(self, number: int, progress: Path, refuses: int = -1):
        if number == refuses:
            raise ValueError(f"rank {number} was not built")
        if refuses >= 0:
            time.sleep(600)  # waits for the rank that is not built
        self._number, self._progress = number, StepCounts(progress)

    def total(self, x: Tensor) -> tuple[int, float]:
        return self._number, float(x.sum())

    def count(self) -> None:
        self._progress.step()

    def fail(self, only: int = -1) -> None:
        if only in (-1, self._number):
            raise ValueError(f"no {self._number}")

    def fail_or_wait(self, failing: int) -> None:
        self.fail(failing)
        time.sleep(60)

    def end(self, ending: int, number: int) -> None:
        """End one rank by a signal, while the others wait for it."""
        if self._number == ending:
            os.kill(os.getpid(), number)
        time.sleep(60)

    def hang(self, hanging: int) -> None:
        """Let one rank hang, while the others finish."""
        self._progress.step()
        if self._number == hanging:
            time.sleep(60)

    def loop(self, looping: int) -> None:
        """Let one rank loop with the interpreter lock held, while the others wait for it."""
        if self._number == looping:
            re.match("(a+)+$", 60 * "a" + "b")
        self._progress.step()
        time.sleep(60)

    def compile(self, seconds: float) -> None:
        self._progress.compiles()
        time.sleep(seconds)

    def close(self) -> None:
        return None


STOP, KILL = signal.SIGSTOP, signal.SIGKILL
BIG = torch.ones(200_000)
