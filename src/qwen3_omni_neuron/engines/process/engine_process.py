"""The caller's side of processes with an engine each: start them, call the engines, end them."""

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
END_S, KILL_S = 1.0, 5.0  # time for a process to end after its connection, and after SIGKILL
TICK_S = 0.1
GRACE_S = 0.5  # time the other processes have to answer after one has failed


class EngineGroup:
    """Processes that build an engine each, and are sent the same calls in the same order.

    An engine is any object with a `close` method and the attribute `fault`: see engines.protocols.
    A call is for all of them, or for the first ones alone. It returns the first one's result when
    all that it is for have answered. If a process ends, hangs, or fails where others don't, all are
    ended: they may be waiting for each other, and none can go on without it. They end with `close`,
    and also when this process ends, in whatever way.
    """

    def __init__(
        self,
        names: Sequence[str],
        factories: Sequence[Callable[[], Any]],
        environments: Sequence[Mapping[str, str]],
        threads: int | None = None,
    ) -> None:
        """Start the processes, which build their engines side by side.

        names: the engines' names in messages. factories: make the engines; they are pickled, so
        each must be a function of a module or a functools.partial of one, not from the main script.
        environments: environment variables to add. threads: number of threads of torch's operations
        in a process.
        Raises OSError if one can't be started, and errors of pickling a factory.
        """
        self._calling = threading.Lock()  # held from a request to the last answer
        self._closing = threading.Lock()
        self._error: Qwen3OmniError | None = None  # of every later call
        self._started = time.monotonic()
        self._processes: list[_Process] = []
        # Also ends them when this object is garbage collected, and at exit.
        self._end = finalize(self, _end, self._processes)
        requests = SharedBlock()
        try:
            for name, factory, env in zip(names, factories, environments, strict=True):
                process = _Process(name, env, requests)
                self._processes.append(process)
                # As bytes, which are not in the block that they all share.
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

        timeout_s: longest wait from now. Raises the error of an engine's build, and EngineDiedError
        if a process ended or took longer. All are closed then.
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
        self,
        method: str,
        *arguments: object,
        limit_s: float = math.inf,
        members: int | None = None,
    ) -> Any:
        """Call a method of every engine. Calls from several threads run one after the other.

        limit_s: time after which the call counts as hung. members: number of the first engines that
        are called; None: all.
        Raises the error that every one of them raised, with its traceback as `__cause__`;
        EngineDiedError that names a process that ended, hung, or failed alone; ClosedError after
        `close`. A call in progress raises the last two at once.
        """
        return self._request((method, arguments), limit_s, members)

    def read(self, attribute: str) -> Any:
        """Return the current value of an attribute of the engine. Raises the errors of `call`."""
        return self._request((attribute, None))

    def fault(self) -> EngineDiedError | None:
        """Poll the processes. Returns an error if no call can be made, else None.

        If one has ended, all are ended. During a call nothing is polled here: the call does it.
        Returns None after `close`. Any thread may call it.
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
        """End the processes within seconds: close their connections, then kill them.

        Any thread may call it, also while another thread is in a call. A second call does nothing.
        """
        if self._error is None:
            self._error = ClosedError("The model's engines were closed. Load the model again.")
        with self._closing:
            self._end()
            with self._calling:  # the disconnection has woken a call in progress
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
        """Take the processes' answers. Returns results and exceptions by their indices.

        After an exception the other processes have GRACE_S to answer. Raises EngineDiedError for a
        process that ended and, where none failed, for those that take longer than the limit.
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
        # Ticks, not a clock, which goes on while all processes are stopped.
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
        """Return the error with the reason why a connection ended, after killing all."""
        if self._error is None:
            status = None
            with suppress(subprocess.TimeoutExpired):
                status = process.popen.wait(END_S)
            problem = f"{process.label} {describe_exit(status)}. Load the model again."
            self._kill(EngineDiedError(problem + process.quoted_output()))
        assert self._error is not None
        return self._error

    def _kill(self, error: BaseException) -> None:
        """Kill every process. Later calls raise the reason."""
        if self._error is None:
            said = "A call was interrupted, which ended its processes. Load the model again."
            self._error = error if isinstance(error, EngineDiedError) else ClosedError(said)
        for process in self._processes:
            process.popen.kill()

    def _refuse_where_ended(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)


class _Process:
    """A started process, its connection, and its output."""

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
        """Send a message. Where the process has ended, its answer tells why."""
        with suppress(DisconnectedError):
            self.mailbox.post(packed)

    def quoted_output(self) -> str:
        tail = self.output.read()
        return f"\nThe end of its output:\n{tail}" if tail else "\nIt printed nothing."

    def close(self) -> None:
        self.mailbox.close()
        self.output.close()


def _named(request: tuple[str, Any]) -> str:
    """Return a call's method and its arguments that are words, such as a graph's label."""
    method, arguments = request
    return " ".join([method, *(word for word in arguments or () if isinstance(word, str))])


def _end(processes: Sequence[_Process]) -> None:
    """End processes by the mildest means that works."""
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
