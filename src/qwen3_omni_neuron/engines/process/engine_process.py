"""The caller's side of a process with one engine: start it, call the engine, end it."""

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.engines.process.child import (
    STACK_SIGNAL,
    OutputTail,
    describe_exit,
    start_child,
)
from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.engines.process.mailbox import DisconnectedError, Mailbox, SharedBlock
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, Qwen3OmniError

logger = logging.getLogger(__name__)

LIVENESS_S = 1.0  # how often a call checks that the process still runs: see _wait
# Time for a process to end after its connection is closed, after SIGTERM, and after SIGKILL.
DISCONNECT_S, TERMINATE_S, KILL_S = 1.0, 1.0, 5.0
STACK_S = 0.1  # time for it to print its stack


class EngineProcess:
    """A process that builds one engine and runs calls of its methods.

    An engine is any object with a `close` method. The process is started at once; `wait_ready`
    waits for the engine, so that several can be built at the same time. The process ends with
    `close`, and also when this process ends, in whatever way.

    _calling guards the mailbox: a call holds it from its request to its answer. _state guards
    _refusal, the error that every later call raises. _closing lets one thread close, or look.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[], Any],
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        requests: SharedBlock | None = None,
    ) -> None:
        """Start the process.

        name: the engine's name in messages. factory: makes the engine; it is pickled, so it must be
        a function of a module or a functools.partial of one, not from the main script.
        env: environment variables to add to this process's; they are set before the new process
        imports anything. threads: number of threads of torch's operations in it. requests: the
        block for requests, where several processes are sent the same ones; see
        engines.process.engine_group.
        Raises OSError if it can't be started, and errors of pickling the factory.
        """
        self._name = name
        self._calling = threading.Lock()
        self._state = threading.Lock()
        self._closing = threading.Lock()
        self._refusal: tuple[type[Qwen3OmniError], str] | None = None
        self._ready = self._was_stopped = False
        self._started = time.monotonic()
        self._output = OutputTail()
        self._mailbox, self._process = _start(self._output, env or {}, requests)
        self._poll = select.poll()
        self._poll.register(self._mailbox.fileno(), select.POLLIN)
        # Also ends the process when this object is garbage collected, and at exit.
        self._end = finalize(self, _end, self._mailbox, self._process)
        try:
            self._mailbox.send((factory, threads))
        except DisconnectedError:
            return  # wait_ready raises it
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine is built.

        timeout_s: longest wait from now. Raises the error of the build, and EngineDiedError if the
        process ended or took longer; it is closed then.
        """
        try:
            with self._calling:
                self._refuse_where_ended()
                if not self._ready:
                    self._exchange(None, timeout_s)
                    self._ready = True
                    seconds = time.monotonic() - self._started
                    logger.info("%s is ready after %.1f s", self.label, seconds)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine. Calls from several threads run one after the other.

        Raises the method's exception, with its traceback as `__cause__`; EngineDiedError if the
        process ended; ClosedError after `close`. A call in progress raises the last two at once.
        """
        with self._calling:
            self._refuse_where_ended()
            return self._exchange((method, arguments))

    def read(self, attribute: str) -> Any:
        """Return the current value of an attribute of the engine. Raises the errors of `call`."""
        with self._calling:
            self._refuse_where_ended()
            return self._exchange((attribute, None))

    def pack(self, method: str, *arguments: object) -> bytes:
        """Pack a call for every process that shares the block of requests; see `post`."""
        return self._mailbox.pack((method, arguments))

    def post(self, packed: bytes) -> None:
        """Send a packed call, whose answer `take` returns. One thread at a time.

        Raises ClosedError after `close`. If the process has ended, `take` raises the error.
        """
        self._refuse_where_ended()
        with suppress(DisconnectedError):
            self._mailbox.post(packed)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when an answer can be taken."""
        return self._mailbox.fileno()

    def take(self) -> tuple[bool, Any]:
        """Receive the answer to a posted call, or to the build of the engine.

        Returns True and the result, or False and the exception. Raises EngineDiedError.
        """
        try:
            done, value = self._mailbox.receive()
        except DisconnectedError:
            raise self._died() from None
        return done, value if done else value.exception()

    def fault(self) -> EngineDiedError | None:
        """Poll the process, also during a call. Returns an error if it can't be called, else None.

        A process that two polls in a row find stopped is ended. One poll is not enough: it may come
        between the signals that continue a process group one by one, as the terminal's fg does.
        Returns None after `close`.
        """
        if self._refusal is None and self._closing.acquire(blocking=False):
            try:
                if self._process.poll() is not None:
                    self._died()
                stopped = self._refusal is None and _is_stopped(self.pid)
                if stopped and self._was_stopped:
                    self._end_stopped()
                self._was_stopped = stopped
            finally:
                self._closing.release()
        if self._refusal is None or self._refusal[0] is not EngineDiedError:
            return None
        return EngineDiedError(self._refusal[1])

    def check(self) -> None:
        """Raise EngineDiedError if the process has ended or is stopped; a stopped one is ended.

        Nothing is raised while an answer that it sent before its end can still be received.
        """
        if self._process.poll() is not None:
            if self._poll.poll(0):
                return
            raise self._died()
        if _is_stopped(self.pid):
            self._end_stopped()
            raise self._died()

    def stack(self) -> str:
        """Make the process print its main thread's stack. Returns the end of its output."""
        self._process.send_signal(STACK_SIGNAL)
        time.sleep(STACK_S)
        return self._quoted_output()

    def end(self, reason: str) -> None:
        """Kill the process at once. Later calls raise EngineDiedError with the reason."""
        self._refuse(EngineDiedError, reason)
        self._process.kill()

    def close(self) -> None:
        """End the process within seconds: close its connection, then terminate it, then kill it.

        Any thread may call it, also while another thread is in a call. A second call does nothing.
        """
        self._refuse(ClosedError, f"{self.label} was closed. Load the model again.")
        with self._closing:
            self._end()
            with self._calling:  # the disconnection has woken a call in progress
                self._mailbox.close()
                self._output.close()

    @property
    def label(self) -> str:
        """The engine's name and the process's id, for messages."""
        return f"The {self._name} engine (process {self.pid})"

    def _exchange(self, request: object | None, timeout_s: float | None = None) -> Any:
        """Send a request, if there is one, and wait for the next answer."""
        try:
            if request is not None:
                self._mailbox.send(request)
            self._wait(timeout_s)
            done, value = self._mailbox.receive()
        except DisconnectedError:
            raise self._died() from None
        except Exception:  # the request was not sent, or the answer was received whole
            raise
        except BaseException:
            # A KeyboardInterrupt: the next call would receive this call's answer.
            self._refuse(ClosedError, f"A call of {self.label} was interrupted, which ended it.")
            self._process.kill()
            raise
        if not done:
            raise value.exception()
        return value

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an answer or the end of the connection."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait_s = LIVENESS_S
        while True:
            if deadline is not None:
                wait_s = min(LIVENESS_S, deadline - time.monotonic())
                if wait_s <= 0:
                    problem = f"{self.label} was not ready within {timeout_s:g} s, and was ended."
                    raise EngineDiedError(problem + self._quoted_output())
            if self._poll.poll(1000 * wait_s):
                return
            # A stopped process never answers, and a child of the process may keep the connection
            # open after its end.
            self.check()

    def _end_stopped(self) -> None:
        self.end(f"{self.label} was stopped by a signal, and was ended. Load the model again.")

    def _died(self) -> Qwen3OmniError:
        """Return the error with the reason why the connection ended."""
        if self._refusal is None:
            try:
                status = self._process.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = None
            problem = f"{self.label} {describe_exit(status)}. Load the model again."
            self._refuse(EngineDiedError, problem + self._quoted_output())
        assert self._refusal is not None
        kind, message = self._refusal
        return kind(message)

    def _quoted_output(self) -> str:
        tail = self._output.read()
        return f"\nThe end of its output:\n{tail}" if tail else "\nIt printed nothing."

    def _refuse(self, kind: type[Qwen3OmniError], message: str) -> None:
        """Make every later call raise an error. The first error that is set stays."""
        with self._state:
            if self._refusal is None:
                self._refusal = (kind, message)

    def _refuse_where_ended(self) -> None:
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)


def _start(
    output: OutputTail, env: Mapping[str, str], requests: SharedBlock | None
) -> "tuple[Mailbox, subprocess.Popen[bytes]]":
    """Start a server process. Returns this end of its mailbox, and the process."""
    ours, theirs = socket.socketpair()
    requests, answers = requests or SharedBlock.create(), SharedBlock.create()
    mailbox = Mailbox(ours, incoming=answers, outgoing=requests)
    descriptors = (theirs.fileno(), requests.fileno(), answers.fileno())
    server = "qwen3_omni_neuron.engines.process.server"
    try:
        process = start_child(
            server, descriptors, output, {**os.environ, **env}, stdin=subprocess.DEVNULL
        )
    except BaseException:
        mailbox.close()
        output.close()
        raise
    finally:
        theirs.close()
    return mailbox, process


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP, and not by a debugger.

    False where the system does not say.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _end(mailbox: Mailbox, process: subprocess.Popen) -> None:
    """End the process by the mildest means that works."""
    for end, wait_s in (
        (mailbox.disconnect, DISCONNECT_S),
        (process.terminate, TERMINATE_S),
        (process.kill, KILL_S),
    ):
        end()
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue
