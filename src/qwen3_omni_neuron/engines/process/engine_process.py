"""The caller's side of engine processes: start, call, end."""

import logging
import math
import os
import pickle
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from qwen3_omni_neuron.engines.process.child import OutputTail, describe_exit, start_child
from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.engines.process.mailbox import DisconnectedError, Mailbox, SharedBlock
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, Qwen3OmniError

logger = logging.getLogger(__name__)

SERVER = "qwen3_omni_neuron.engines.process.server"
END_S, KILL_S = 1.0, 5.0  # until a process ends after its connection, and after SIGKILL
TICK_S = 0.1
GRACE_S = 0.5  # for the other processes to answer after a failure


class EngineGroup:
    """Processes that each build an engine, and get the same calls in the same order.

    An engine is an object with method `close` and attribute `fault`: see engines.protocols. A call
    goes to all or to the first ones, and returns the first one's result when all have answered. If
    a process ends, hangs, or fails alone, all are ended: they may wait for each other. They end
    with `close`, or with this process.
    """

    def __init__(
        self,
        names: Sequence[str],
        factories: Sequence[Callable[[], Any]],
        environments: Sequence[Mapping[str, str]],
        threads: int | None = None,
    ) -> None:
        """Start the processes, which build their engines in parallel.

        names: engine names for messages. factories: return the engines; pickled, so each must be
        a module's function, or a functools.partial of one, but not of the main script.
        environments: variables to add. threads: number of torch threads per process.
        Raises OSError if one can't start, and errors of pickling a factory.
        """
        self._calling = threading.Lock()  # held from a request to the last answer
        self._closing = threading.Lock()
        self._error: Qwen3OmniError | None = None  # every later call raises it
        self._started = time.monotonic()
        self._processes: list[_Process] = []
        # Also ends them at exit and on garbage collection.
        self._end = finalize(self, _end, self._processes)
        requests = SharedBlock()
        try:
            for name, factory, env in zip(names, factories, environments, strict=True):
                process = _Process(name, env, requests)
                self._processes.append(process)
                # In the pipe: all share the block.
                process.post(process.mailbox.pack((pickle.dumps(factory), threads)))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.popen.pid for process in self._processes]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every engine is built, once.

        Raises the error of an engine's build, and EngineDiedError if a process ended or exceeded
        timeout_s. All are then closed.
        """
        try:
            with self._calling:
                self._refuse_where_ended()
                _, failures = self._collect("starting", self._processes, timeout_s)
                for failure in failures.values():
                    raise failure
        except BaseException:
            self.close()
            raise
        for process in self._processes:
            seconds = time.monotonic() - self._started
            logger.info("%s is ready after %.1f s", process.label, seconds)

    def call(
        self, method: str, *arguments: object, limit_s: float = math.inf, members: int | None = None
    ) -> Any:
        """Call a method of every engine. Threads' calls run one after the other.

        limit_s: after it the call counts as hung. members: call the first ones only; None: all.
        Raises an error that all raised, with its traceback as `__cause__`; EngineDiedError with the
        process that ended, hung, or failed alone; ClosedError after `close`. The last two interrupt
        a call.
        """
        return self._request((method, arguments), limit_s, members)

    def read(self, attribute: str) -> Any:
        """Return an engine attribute's current value. Raises the errors of `call`."""
        return self._request((attribute, None))

    def fault(self) -> EngineDiedError | None:
        """Poll the processes; return an error if no call can be made, else None.

        If one has ended, all are ended. A running call polls. None after `close`. Thread-safe.
        """
        if self._error is None and self._calling.acquire(blocking=False):
            try:
                for process in self._processes:
                    if process.popen.poll() is not None:
                        self._died(process)
                        break
            finally:
                self._calling.release()
        error = self._error
        return EngineDiedError(*error.args) if isinstance(error, EngineDiedError) else None

    def close(self) -> None:
        """End the processes within seconds: disconnect, then kill them.

        Thread-safe, also during a call. A second call does nothing.
        """
        if self._error is None:
            self._error = ClosedError("The model's engines were closed. Load the model again.")
        with self._closing:
            self._end()
            with self._calling:  # the disconnection has ended any call
                for process in self._processes:
                    process.close()

    def _request(
        self, request: tuple[str, Any], limit_s: float = math.inf, members: int | None = None
    ) -> Any:
        with self._calling:
            self._refuse_where_ended()
            called = self._processes[:members]
            packed = called[0].mailbox.pack(request)
            try:
                for process in called:
                    process.post(packed)
                results, failures = self._collect(_named(request), called, limit_s)
                if failures and len(failures) < len(called):
                    index, cause = next(iter(failures.items()))
                    raise EngineDiedError(
                        f"{called[index].label} failed and others did not ({cause}), which ended "
                        "all. Load the model again."
                    ) from cause
            except BaseException as error:
                self._kill(error)
                raise
            if failures:
                raise failures[0]
            return results[0]

    def _collect(
        self, what: str, called: "Sequence[_Process]", limit_s: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Collect the processes' results and exceptions, by index.

        After an exception the others have GRACE_S to answer. Raises EngineDiedError for a process
        that ended and, if none failed, for those that exceed the limit.
        """
        if len(called) == 1 and limit_s == math.inf:  # for speed
            done, value = self._take(called[0])
            return ({0: value}, {}) if done else ({}, {0: value})
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = {process.mailbox.fileno(): index for index, process in enumerate(called)}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        # Ticks: a clock advances while all processes are stopped.
        ticks, most = 0, limit_s / TICK_S
        while waiting:
            ready = poll.poll(1000 * TICK_S)
            for descriptor, _ in ready:
                index = waiting.pop(descriptor)
                poll.unregister(descriptor)
                done, value = self._take(called[index])
                if not done and not failures:
                    most = ticks + GRACE_S / TICK_S
                (results if done else failures)[index] = value
            ticks += not ready
            if waiting and ticks >= most:
                if failures:
                    break
                late = [called[index] for index in waiting.values()]
                raise EngineDiedError(
                    f"{', '.join(process.label for process in late)} did not finish {what!r} "
                    f"within {limit_s:.1f} s, which ended all. Load the model again."
                    + "".join(process.quoted_output() for process in late)
                )
        return results, failures

    def _take(self, process: "_Process") -> tuple[bool, Any]:
        """Wait for an answer. Returns True and the result, or False and the exception."""
        try:
            done, value = process.mailbox.receive()
        except DisconnectedError:
            raise self._died(process) from None
        return done, value if done else value.exception()

    def _died(self, process: "_Process") -> Qwen3OmniError:
        """Kill all; return an error with the reason why a connection ended."""
        if self._error is None:
            status = None
            with suppress(subprocess.TimeoutExpired):
                status = process.popen.wait(END_S)
            problem = f"{process.label} {describe_exit(status)}. Load the model again."
            self._kill(EngineDiedError(problem + process.quoted_output()))
        assert self._error is not None
        return self._error

    def _kill(self, error: BaseException) -> None:
        if self._error is None:
            said = "A call was interrupted, which ended its processes. Load the model again."
            self._error = error if isinstance(error, EngineDiedError) else ClosedError(said)
        for process in self._processes:
            process.popen.kill()

    def _refuse_where_ended(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)


class _Process:
    def __init__(self, name: str, env: Mapping[str, str], requests: SharedBlock):
        self.output = OutputTail()
        ours, theirs = Pipe()
        answers = SharedBlock()
        self.mailbox = Mailbox(ours, incoming=answers, outgoing=requests)
        descriptors = (theirs.fileno(), requests.fileno(), answers.fileno())
        variables = {**os.environ, **env}
        try:
            with theirs:
                self.popen = start_child(
                    SERVER, descriptors, self.output, variables, stdin=subprocess.DEVNULL
                )
        except BaseException:
            self.close()
            raise
        self.label = f"The {name} engine (process {self.popen.pid})"

    def post(self, packed: bytes) -> None:
        """Send a message. If the process has ended, its answer tells why."""
        with suppress(DisconnectedError):
            self.mailbox.post(packed)

    def quoted_output(self) -> str:
        tail = self.output.read()
        return f"\nThe end of its output:\n{tail}" if tail else "\nIt printed nothing."

    def close(self) -> None:
        self.mailbox.close()
        self.output.close()


def _named(request: tuple[str, Any]) -> str:
    """Return a call's method and string arguments, such as a graph's label."""
    method, arguments = request
    return " ".join([method, *(word for word in arguments or () if isinstance(word, str))])


def _end(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.mailbox.disconnect()
    until = time.monotonic() + END_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(KILL_S)
