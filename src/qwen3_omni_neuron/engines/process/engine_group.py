"""Several processes with an engine each that make every call together, and their step counts."""

import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_omni_neuron.engines.process.engine_process import EngineProcess
from qwen3_omni_neuron.engines.process.mailbox import SharedBlock
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, Qwen3OmniError

TICK_S = 0.1  # interval at which a call checks processes that do not answer
GRACE_S = 0.5  # time the other processes have to answer after one has failed
USUAL_FACTOR = 20  # a call hangs if it takes this many times the longest one of its kind


@dataclass
class CallLimit:
    """Time after which a call counts as hung, derived from earlier calls of its kind.

    first_s: limit of the first call, and of a call in which a process compiles. least_s: smallest
    limit of a later call.
    """

    first_s: float
    least_s: float
    _longest_s: float | None = field(default=None, init=False)

    @property
    def seconds(self) -> float:
        """The limit of the next call."""
        if self._longest_s is None:
            return self.first_s
        return max(self.least_s, USUAL_FACTOR * self._longest_s)

    def add(self, seconds: float) -> None:
        """Take a call's time into account; 0 for a call in which a process compiled."""
        self._longest_s = max(self._longest_s or 0.0, seconds)


class StepCounts:
    """Counts of steps and compilations, in a file that one process writes and another one reads.

    Processes make the steps of a call in the same order, so all others wait for the process that
    has made the fewest of them. A compilation may take minutes.
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


@dataclass(frozen=True)
class _Counts:
    """All processes' counts when a call is sent. steps: by process. compilations: their sum."""

    steps: Sequence[int]
    compilations: int


class EngineGroup:
    """Processes that are sent the same calls in the same order, such as the ranks of a model.

    A call is for all of them, or for the first ones alone. Its arguments are in memory that all
    share. It returns the first process's result when all that it is for have answered. If a process
    ends, is stopped, hangs, or fails where others don't, all are ended: they may be waiting for
    each other, and none can go on without it.

    _calling guards the processes: a call holds it from its request to the last answer. _error is
    the error that every later call raises, set once.
    """

    def __init__(
        self,
        names: Sequence[str],
        factories: Sequence[Callable[[], Any]],
        environments: Sequence[Mapping[str, str]],
        progress: Sequence[StepCounts],
        threads: int | None = None,
    ) -> None:
        """Start the processes. names: used in messages. Other arguments: see EngineProcess.

        progress: step counts of the engines, one for each; they stay as they are if engines don't
        count.
        """
        self._calling = threading.Lock()
        self._error: Qwen3OmniError | None = None
        self._progress = progress
        self._processes: list[EngineProcess] = []
        block = SharedBlock.create()
        try:
            for name, factory, env in zip(names, factories, environments, strict=True):
                self._processes.append(EngineProcess(name, factory, env, threads, block))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every engine is built. Raises the error of an engine's build.

        Raises EngineDiedError if a process ended or took longer. All are closed then.
        """
        try:
            with self._calling:
                limit = CallLimit(timeout_s, timeout_s)
                every = len(self._processes)
                _, failures = self._collect("starting", limit, self._counts(), every)
                for failure in failures.values():
                    raise failure
        except BaseException:
            self.close()
            raise

    def call(
        self, method: str, *arguments: object, limit: CallLimit, members: int | None = None
    ) -> Any:
        """Call a method of every engine.

        limit: limit of this kind of call, updated by this call. members: number of the first
        engines that are called, the others being left alone; None: all.
        Raises the error that every one of them raised; EngineDiedError that names a process that
        ended, was stopped, hung, or failed alone; ClosedError after `close`.
        """
        with self._calling:
            if self._error is not None:
                raise self._error
            packed = self._processes[0].pack(method, *arguments)
            named = " ".join([method, *(word for word in arguments if isinstance(word, str))])
            called = self._processes[:members]
            started, before = time.monotonic(), self._counts()
            try:
                for process in called:
                    process.post(packed)
                results, failures = self._collect(named, limit, before, len(called))
                if failures and len(failures) < len(called):
                    raise self._failed_alone(failures)
            except BaseException as error:
                self._end(error)
                raise
            for index in sorted(failures):
                raise failures[index]
            compiled = self._counts().compilations > before.compilations
            limit.add(0.0 if compiled else time.monotonic() - started)
            return results[0]

    def fault(self) -> EngineDiedError | None:
        """Poll the processes. Returns an error if no call can be made, else None.

        If one has ended, all are ended. During a call nothing is polled here: the call does it.
        Returns None after `close`.
        """
        if self._error is None and self._calling.acquire(blocking=False):
            try:
                faults = (process.fault() for process in self._processes)
                found = next((error for error in faults if error is not None), None)
                if found is not None:
                    self._end(found)
            finally:
                self._calling.release()
        error = self._error
        return EngineDiedError(str(error)) if isinstance(error, EngineDiedError) else None

    def close(self) -> None:
        """End the processes within seconds. Any thread may call it, also during a call."""
        if self._error is None:
            self._error = ClosedError("The model's ranks were closed. Load the model again.")
        closing = [threading.Thread(target=process.close) for process in self._processes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _collect(
        self, call: str, limit: CallLimit, before: _Counts, members: int
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Take the first processes' answers. Returns results and exceptions by their indices.

        before: taken before the call was sent, because a process may compile at once.
        After an exception the other processes have GRACE_S to answer. Raises EngineDiedError for a
        process that ended or was stopped, and, where none failed, for those that take longer than
        the limit.
        """
        # Time is counted in ticks without an answer: a clock goes on while a machine sleeps.
        ticks, waited_s, until_s = 0, 0.0, limit.seconds
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        called = self._processes[:members]
        waiting = {process.fileno(): index for index, process in enumerate(called)}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting:
            ready = poll.poll(1000 * TICK_S)
            for descriptor, _ in ready:
                index = waiting.pop(descriptor)
                poll.unregister(descriptor)
                done, value = self._processes[index].take()
                if not done and not failures:
                    until_s = waited_s + GRACE_S
                (results if done else failures)[index] = value
            if ready:
                continue
            ticks += 1
            waited_s = ticks * TICK_S
            for index in waiting.values():
                self._processes[index].check()
            if not failures and self._counts().compilations > before.compilations:
                until_s = limit.first_s
            if waited_s >= until_s:
                if failures:
                    break
                raise self._hung(call, waited_s, list(waiting.values()), before, members)
        return results, failures

    def _counts(self) -> _Counts:
        steps = [progress.steps for progress in self._progress]
        return _Counts(steps, sum(progress.compilations for progress in self._progress))

    def _hung(
        self, call: str, waited_s: float, waiting: Sequence[int], before: _Counts, members: int
    ) -> EngineDiedError:
        """Return the error that names the waiting processes with the fewest steps in this call."""
        now = self._counts().steps
        steps = {index: now[index] - before.steps[index] for index in waiting}
        last = [index for index in waiting if steps[index] == min(steps.values())]
        processes = [self._processes[index] for index in last]
        named = ", ".join(process.label for process in processes)
        others = f"{members - len(last)} of {members} were further or had finished"
        return EngineDiedError(
            f"{named} did not finish {call!r} within {waited_s:.1f} s ({others}), which ended all. "
            "Load the model again." + "".join(process.stack() for process in processes)
        )

    def _failed_alone(self, failures: Mapping[int, Exception]) -> EngineDiedError:
        index, cause = next(iter(failures.items()))
        error = EngineDiedError(
            f"{self._processes[index].label} failed and others did not ({cause}), which ended all. "
            "Load the model again."
        )
        error.__cause__ = cause
        return error

    def _end(self, error: BaseException) -> None:
        """Kill every process. Later calls raise EngineDiedError with the reason."""
        if self._error is None:
            said = str(error) if isinstance(error, EngineDiedError) else "A call was interrupted."
            self._error = EngineDiedError(said)
        for process in self._processes:
            process.end(str(self._error))
