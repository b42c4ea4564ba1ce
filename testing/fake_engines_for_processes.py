"""Small engines, and the processes that test_process_engines.py starts.

They are in a module of their own, since an engine's process has to import it.
"""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.process.engine_process import EngineGroup
from qwen3_omni_neuron.errors import CheckpointError, EngineDiedError, OptionError


class UnpicklableError(Exception):
    """Error that pickles but can't be unpickled, which calls it with the message alone."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"code {code} at {place}")


class FakeThinker:
    """Engine that returns its arguments; some methods fail, each in its own way."""

    chunked_prefill = True
    fault = None

    def __init__(self, slots: int = 2, note: str = "") -> None:
        self.slots = slots
        self.context_length = 128
        self._note = note

    def close(self) -> None:
        if self._note:
            Path(self._note).write_text("closed", encoding="utf-8")

    def echo(self, value: Any) -> Any:
        return value

    def environment(self) -> tuple[str | None, int, list[str]]:
        return os.environ.get("NEURON_RT_VISIBLE_CORES"), torch.get_num_threads(), sys.path

    def refuse(self, kind: str) -> None:
        if kind == "option":
            raise OptionError("speaker is 'Nobody', expected 'Ethan'")
        if kind == "connection":
            raise ConnectionResetError("a file server hung up")
        raise UnpicklableError(7, "here")

    def unpicklable(self) -> Any:
        return lambda: None

    def stall(self, seconds: float) -> None:
        time.sleep(seconds)

    def use_memory(self, megabytes: int) -> None:
        """Take memory and free all of it but the last piece, below which malloc keeps the rest."""
        self._kept = [bytes(50_000) for _ in range(20 * megabytes)][-1]

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")

    def collected(self) -> tuple[int, int]:
        """Return how many objects the garbage collector ignores, and how many it looks through."""
        return gc.get_freeze_count(), len(gc.get_objects())

    def die(self, how: str) -> None:
        sys.stderr.write("about to leave\n")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        faulthandler._sigsegv()  # type: ignore[attr-defined]


class FakeParent:
    """Engine with a process of its own, like an engine over the ranks of a model."""

    def __init__(self) -> None:
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def child_pid(self) -> int:
        return self._child.pid

    def fault(self) -> EngineDiedError | None:
        if self._child.poll() is None:
            return None
        return EngineDiedError("The child of the thinker was ended.")

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


class FakeRank:
    """Engine of one of several processes. refuses: number of the one that can't be built."""

    fault = None

    def __init__(self, number: int, refuses: int = -1):
        if number == refuses:
            raise ValueError(f"rank {number} was not built")
        if refuses >= 0:
            time.sleep(600)  # waits for the rank that is not built
        self._number = number

    def total(self, x: Tensor) -> tuple[int, float]:
        return self._number, float(x.sum())

    def fail(self, only: int = -1) -> None:
        if only in (-1, self._number):
            raise ValueError(f"no {self._number}")

    def fail_or_wait(self, failing: int) -> None:
        self.fail(failing)
        time.sleep(60)

    def end(self, ending: int) -> None:
        """End one rank by a signal, while the others wait for it."""
        if self._number == ending:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def hang(self, hanging: int) -> None:
        """Let one rank hang, while the others finish."""
        if self._number == hanging:
            time.sleep(60)

    def close(self) -> None:
        return


def broken_engine() -> FakeThinker:
    raise CheckpointError("config.json is missing. Download the checkpoint again.")


def engine_that_dies() -> FakeThinker:
    sys.stderr.write("no cores left\n")
    os._exit(4)


def slow_engine(seconds: float) -> FakeThinker:
    time.sleep(seconds)
    return FakeThinker()


def wait_as_parent() -> None:
    """Start two engines, print their process ids, and wait in a call of the first to be killed."""
    processes = [EngineGroup(["thinker"], [FakeThinker], [{}]) for _ in range(2)]
    for process in processes:
        process.wait_ready(60)
    sys.stdout.write(f"{processes[0].pids[0]} {processes[1].pids[0]}\n")
    sys.stdout.flush()
    processes[0].call("stall", 600)


def kill_one_leave_one() -> None:
    """Kill one process, leave another unclosed, and print the latter's id; stderr stays empty."""
    lost, forgotten = (EngineGroup(["thinker"], [FakeThinker], [{}]) for _ in range(2))
    for process in (lost, forgotten):
        process.wait_ready(60)
        process.call("echo", torch.zeros(3_000_000))
    os.kill(lost.pids[0], signal.SIGKILL)
    lost.close()
    sys.stdout.write(f"{forgotten.pids[0]}\n")
