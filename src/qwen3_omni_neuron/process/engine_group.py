"""Several processes with an engine each that make every call together."""

import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, Qwen3OmniError
from qwen3_omni_neuron.process.engine_process import EngineProcess
from qwen3_omni_neuron.process.mailbox import SharedBlock

TICK_S = 0.1  # how often a call looks after processes that do not answer
GRACE_S = 0.5  # how long the others have to answer after one of them has failed


class EngineGroup:
    """Processes that are sent the same calls in the same order, such as the ranks of a model.

    A call's arguments are in memory that all share. It returns what the first process does, when
    all have answered. A process that ends, is stopped, or fails where others don't ends them all:
    they may be waiting for each other, and none can go on without it.

    _calling guards the processes: a call holds it from its request to the last answer. _error is
    what every later call raises, set once.
    """

    def __init__(
        self,
        names: Sequence[str],
        factories: Sequence[Callable[[], Any]],
        environments: Sequence[Mapping[str, str]],
        threads: int | None = None,
    ) -> None:
        """Start the processes. names: for messages. Others: see EngineProcess."""
        self._calling = threading.Lock()
        self._error: Qwen3OmniError | None = None
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
        """Wait until every engine is built. Raises what building one of them raised.

        Raises EngineDiedError where a process ended or took longer. All are closed then.
        """
        try:
            with self._calling:
                _, failures = self._collect(timeout_s)
                for failure in failures.values():
                    raise failure
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Call a method of every engine.

        timeout_s: after which the processes that have not answered are taken for hung.
        Raises what every engine raised; EngineDiedError that names a process that ended, was
        stopped, did not answer, or failed alone; ClosedError after `close`.
        """
        with self._calling:
            if self._error is not None:
                raise self._error
            packed = self._processes[0].pack(method, *arguments)
            try:
                for process in self._processes:
                    process.post(packed)
                results, failures = self._collect(timeout_s)
                if failures and len(failures) < len(self._processes):
                    raise self._failed_alone(failures)
            except BaseException as error:
                self._end(error)
                raise
            for index in sorted(failures):
                raise failures[index]
            return results[0]

    def close(self) -> None:
        """End the processes within seconds. Any thread may call it, also during a call."""
        if self._error is None:
            self._error = ClosedError("The model's ranks were closed. Load the model again.")
        closing = [threading.Thread(target=process.close) for process in self._processes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _collect(self, timeout_s: float | None) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Take every process's answer. Returns results and exceptions by the process's index.

        After an exception the others have GRACE_S. Raises EngineDiedError for a process that ended
        or was stopped, and, where none failed, for those that take longer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = {process.fileno(): index for index, process in enumerate(self._processes)}
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
                    soon = time.monotonic() + GRACE_S
                    deadline = soon if deadline is None else min(deadline, soon)
                (results if done else failures)[index] = value
            if not ready:
                for index in waiting.values():
                    self._processes[index].check()
            if waiting and deadline is not None and time.monotonic() >= deadline:
                if failures:
                    break
                named = ", ".join(self._processes[index].label for index in waiting.values())
                raise EngineDiedError(
                    f"{named} did not answer within {timeout_s:g} s, which ended all. Load the "
                    "model again."
                )
        return results, failures

    def _failed_alone(self, failures: Mapping[int, Exception]) -> EngineDiedError:
        index, cause = next(iter(failures.items()))
        error = EngineDiedError(
            f"{self._processes[index].label} failed and others did not ({cause}), which ended all. "
            "Load the model again."
        )
        error.__cause__ = cause
        return error

    def _end(self, error: BaseException) -> None:
        """Kill every process. Later calls raise EngineDiedError that says why."""
        if self._error is None:
            said = str(error) if isinstance(error, EngineDiedError) else "A call was interrupted."
            self._error = EngineDiedError(said)
        for process in self._processes:
            process.end(str(self._error))
