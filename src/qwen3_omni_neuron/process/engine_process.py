"""A process with one engine in it: started, called, ended."""

import logging
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from qwen3_omni_neuron.engines.protocols import Talker, Thinker, Vocoder
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError, Qwen3OmniError
from qwen3_omni_neuron.process.interpreter import LastWords, exit_words, start_interpreter
from qwen3_omni_neuron.process.mailbox import HungUpError, Mailbox, SharedBlock

logger = logging.getLogger(__name__)

LIVENESS_S = 1.0  # how often a call looks whether the process is there: see _wait
ASK_S, TERMINATE_S, KILL_S = 1.0, 1.0, 5.0  # what each of them gets when a process is to end


class EngineProcess:
    """A process with one engine in it, which it builds and whose methods it calls.

    It is started at once; `wait_ready` waits for the engine, so that several can be built at the
    same time. It ends with `close`, and by itself when this process ends in any way.

    _calling guards the mailbox: a call holds it from its request to its answer. _state guards
    _refusal. _closing lets one thread close.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[], Thinker | Talker | Vocoder],
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Start the process.

        name: of the engine, for messages. factory: makes the engine; it is pickled, so it is a
        function of a module or a functools.partial of one, and neither from the script that is run.
        env: environment variables to add to this process's, there before anything is imported.
        threads: of torch's operations in it.
        Raises OSError where it can't be started, and what pickling the factory raises.
        """
        self._name = name
        self._calling = threading.Lock()
        self._state = threading.Lock()
        self._closing = threading.Lock()
        self._refusal: tuple[type[Qwen3OmniError], str] | None = None
        self._attributes: dict[str, Any] | None = None
        self._started = time.monotonic()
        self._last_words = LastWords()
        self._mailbox, self._process = _start(self._last_words, env or {})
        self._poll = select.poll()
        self._poll.register(self._mailbox.fileno(), select.POLLIN)
        # Also ends the process when this object is forgotten, and at exit.
        self._end = weakref.finalize(self, _end, self._mailbox, self._process)
        try:
            self._mailbox.send((factory, threads))
        except HungUpError:
            return  # wait_ready says so
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the engine. timeout_s: at most, from now on.

        Returns the attributes that its protocol names. Raises what building it raised, and
        EngineDiedError where the process ended or took longer; it is closed then.
        """
        try:
            with self._calling:
                self._refuse_where_ended()
                if self._attributes is None:
                    self._attributes = self._exchange(None, timeout_s)
                    seconds = time.monotonic() - self._started
                    logger.info("%s is ready after %.1f s", self._label, seconds)
                return self._attributes
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine, from any thread; the calls take turns.

        Raises what the method raised, with the traceback there as `__cause__`; EngineDiedError
        where the process ended, and ClosedError after `close`, both at once also in a call that is
        under way.
        """
        with self._calling:
            self._refuse_where_ended()
            return self._exchange((method, arguments))

    def close(self) -> None:
        """End the process: it is asked to, then terminated, then killed, within seconds. Any
        thread's, also while another one is in a call; a second time it does nothing."""
        self._refuse(ClosedError, f"{self._label} was closed. Load the model again.")
        with self._closing:
            self._end()
            with self._calling:  # a call that was under way has been woken by the hang-up
                self._mailbox.close()
                self._last_words.close()

    @property
    def _label(self) -> str:
        return f"The {self._name} engine (process {self.pid})"

    def _exchange(self, request: object | None, timeout_s: float | None = None) -> Any:
        """Send a request, where there is one, and wait for the next answer."""
        try:
            if request is not None:
                self._mailbox.send(request)
            self._wait(timeout_s)
            done, value = self._mailbox.receive()
        except HungUpError:
            raise self._died() from None
        except Exception:  # the request was never sent, or the answer is off the connection
            raise
        except BaseException:
            # A KeyboardInterrupt: the answer would be taken for that of the next call.
            self._refuse(ClosedError, f"A call of {self._label} was interrupted, which ended it.")
            self._process.kill()
            raise
        if not done:
            raise value.exception()
        return value

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an answer or the connection's end."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        patience_s = LIVENESS_S
        while True:
            if deadline is not None:
                patience_s = min(LIVENESS_S, deadline - time.monotonic())
                if patience_s <= 0:
                    words = f"{self._label} was not ready within {timeout_s:g} s, and was ended."
                    raise EngineDiedError(words + self._quoted_last_words())
            if self._poll.poll(1000 * patience_s):
                return
            # A process that it has forked may hold the connection open after it.
            if self._process.poll() is not None:
                raise HungUpError

    def _died(self) -> Qwen3OmniError:
        """Why the connection ended."""
        if self._refusal is None:
            try:
                status = self._process.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = None
            words = f"{self._label} {exit_words(status)}. Load the model again."
            self._refuse(EngineDiedError, words + self._quoted_last_words())
        assert self._refusal is not None
        kind, words = self._refusal
        return kind(words)

    def _quoted_last_words(self) -> str:
        tail = self._last_words.tail()
        return f"\nIts last words:\n{tail}" if tail else "\nIt left no last words."

    def _refuse(self, kind: type[Qwen3OmniError], words: str) -> None:
        """Refuse every later call. What refuses first is the reason that is given."""
        with self._state:
            if self._refusal is None:
                self._refusal = (kind, words)

    def _refuse_where_ended(self) -> None:
        if self._refusal is not None:
            kind, words = self._refusal
            raise kind(words)


def _start(
    last_words: LastWords, env: Mapping[str, str]
) -> "tuple[Mailbox, subprocess.Popen[bytes]]":
    """Start a process that serves. Returns this end of its mailbox, and the process."""
    ours, theirs = socket.socketpair()
    requests, answers = SharedBlock.create(), SharedBlock.create()
    mailbox = Mailbox(ours, incoming=answers, outgoing=requests)
    descriptors = (theirs.fileno(), requests.fileno(), answers.fileno())
    server = "qwen3_omni_neuron.process.server"
    try:
        process = start_interpreter(server, descriptors, last_words, env, stdin=subprocess.DEVNULL)
    except BaseException:
        mailbox.close()
        last_words.close()
        raise
    finally:
        theirs.close()
    return mailbox, process


def _end(mailbox: Mailbox, process: subprocess.Popen) -> None:
    """Ask the process to end, then make it."""
    mailbox.hang_up()
    for insist, patience_s in (
        (None, ASK_S),
        (process.terminate, TERMINATE_S),
        (process.kill, KILL_S),
    ):
        if insist:
            insist()
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
