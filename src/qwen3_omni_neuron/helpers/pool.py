"""Pool of children for one kind of work, forked from a process that it starts.

multiprocessing, pebble and loky unpickle a worker's data, so a hijacked one could take over the
server. They also return one result per call; a grammar computes a mask for each token.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from qwen3_omni_neuron.engines.process.child import (
    OutputTail,
    describe_exit,
    nameless_file,
    start_child,
)
from qwen3_omni_neuron.errors import BusyError, ClosedError
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.fair_places import FairPlaces
from qwen3_omni_neuron.helpers.fork_server import FORK_REQUEST, NO_FORK, OUT_OF_MEMORY, REPORT

logger = logging.getLogger(__name__)
END_S = 1.0  # grace period of a process
DEAF = "closed its connection, but did not end"
# Environment variables for children; others, such as API keys, are withheld.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PREFIXES = ("LD_", "PYTHON", "ASAN_", "UBSAN_")


class Limits(NamedTuple):
    """Limits of a child: additional address space, CPU time, and time."""

    memory_bytes: int
    cpu_s: int
    deadline_s: float


class ChildError(Exception):
    """A child did not answer. The text is a phrase, such as "was ended by SIGSEGV"."""


def environment() -> dict[str, str]:
    """Return the environment variables of fork servers."""
    passed = {n: v for n, v in os.environ.items() if n in _VARIABLES or n.startswith(_PREFIXES)}
    # Forks need one thread; each malloc arena takes 64 MiB of a child's address space.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**passed, **threads, "MALLOC_ARENA_MAX": "1"}


class Pool:
    """Pool of children, used by one event loop.

    module: the fork server's; its `main` calls helpers.fork_server.serve. what: name of a child in
    errors. setup: returns the bytes from which the fork server prepares its children. spare: keep a
    child forked for the next job: a fork of 200 MB and its first page faults take 20 ms.
    """

    def __init__(
        self,
        module: str,
        what: str,
        limits: Limits,
        places: int,
        setup: Callable[[], bytes] = bytes,
        spare: bool = False,
    ):
        self.limits, self.places = limits, FairPlaces(places)
        self._module, self._what, self._setup = module, what, setup
        self._server: _ForkServer | None = None
        self._keeps_spare, self._spare, self._closed = spare, list[Child](), False
        self.children: set[Child] = set()  # alive

    @property
    def pid(self) -> int | None:
        """The fork server's process id, or None."""
        return None if self._server is None else self._server.pid

    def start(self) -> "_ForkServer":
        """Start the fork server unless it runs. Raises ClosedError and OSError."""
        if self._closed:
            raise self.refusal()
        if self._server is not None and self.pid is None:
            logger.warning("%s ended by itself. %s", self._module, self.output())
            self._end()
        if self._server is None:
            with nameless_file() as setup:
                setup.write(self._setup())
                self._server = _ForkServer(self._module, setup.fileno())
        return self._server

    @contextlib.asynccontextmanager
    async def child(
        self, job: bytes, result_bytes: int = 0, more: bytes = b""
    ) -> AsyncIterator["Child"]:
        """Fork a child, which an exception in the block ends. Raises BusyError and ClosedError.

        job, more: parts of its job. result_bytes: size of its result's file, if known.
        """
        try:
            server = self.start()
            await server.until_ready()
            child = self._spare.pop() if self._spare else None
            if child is None or child.exited.done():
                child = Child(self, server, result_bytes)
        except OSError as error:
            raise self.refusal(str(error)) from error
        try:
            await child.begin(job, more)
            yield child
        except BaseException:
            child.close()
            raise
        finally:
            if self._keeps_spare and not self._spare and server.pid is not None:
                with contextlib.suppress(OSError):
                    self._spare.append(Child(self, server, result_bytes))

    async def close(self) -> None:
        """End the fork server and all children."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None
        for child in [*self.children]:
            child.ended(None)

    def output(self) -> str:
        """Return the last output of fork server and children, for the log."""
        return "" if self._server is None else self._server.output()

    def refusal(self, why: str = "the process that starts it has ended") -> Exception:
        """Return the error if no child is available."""
        if self._closed:
            return ClosedError(f"the processes of {self._what}s were closed.")
        return BusyError(f"could not start a process for a {self._what}: {why}. Try again later.")


class Child:
    """The pool's side of a child.

    received: bytes of an answer. exited: return code as subprocess has it; NO_FORK if the fork
    failed, None if the child was killed here or the fork server ended first.
    """

    def __init__(self, pool: Pool, server: "_ForkServer", result_bytes: int):
        self._pool, self._server = pool, server
        self._loop = asyncio.get_running_loop()
        self._why: str | None = None  # why it was killed
        self._timers: list[asyncio.TimerHandle] = []
        self.received = bytearray()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self.result = nameless_file()
        self.socket, theirs = socket.socketpair()
        # The fork server kills a child whose report has no reader.
        self._report, report = socket.socketpair()
        with theirs, report:
            self.socket.setblocking(False)
            os.ftruncate(self.result.fileno(), result_bytes)
            if result_bytes and sys.platform == "linux":
                # A file that shrinks would kill a process that has mapped it.
                fcntl.fcntl(self.result, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            files = (theirs, self.result, report)
            server.fork(pool.limits, [file.fileno() for file in files])
        self._loop.add_reader(self._report, self._on_report)
        pool.children.add(self)

    async def begin(self, *job: bytes) -> None:
        """Send the child its job, and set its deadline."""
        late = f"needed more than {self._pool.limits.deadline_s:g} s"
        self.kill(late, self._pool.limits.deadline_s)
        with contextlib.suppress(OSError):  # it has ended
            for part in (wire.JOB.pack(*map(len, job)), *job):
                await self._loop.sock_sendall(self.socket, part)

    def end_deadline(self) -> None:
        """Remove the child's deadline."""
        for timer in self._timers:
            timer.cancel()

    async def answer(self, kind: bytes) -> wire.Answer:
        """Wait for the next answer. Raises ChildError if it is of another kind, or the child ends.

        Raises the InputError that the child sent instead, BusyError and ClosedError.
        """
        try:
            while (found := wire.next_answer(self.received)) is None:
                if not await self._receive():
                    await self._ended()
                    raise self.error
            if found.kind == wire.ERROR:
                raise found.error
            if found.kind != kind:
                raise wire.BrokenAnswerError("an answer of another kind")
        except wire.BrokenAnswerError as error:
            raise ChildError(f"sent {error}") from error
        return found

    def go_on(self) -> None:
        """Let the child continue."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.send(wire.GO)

    async def end(self) -> None:
        """Wait until the child has ended. Raises the errors of `answer` unless its status is 0."""
        if await self._receive() or self.received:
            raise ChildError("sent an unexpected answer")
        await self._ended()
        if self.exited.result() != 0:
            raise self.error

    @property
    def error(self) -> Exception:
        """Error of a child that ended before it answered."""
        status, limits = self.exited.result(), self._pool.limits
        if self._why is not None:
            return ChildError(self._why)
        if status is None:
            return self._pool.refusal()
        if status == NO_FORK:
            return self._pool.refusal("the system allows no more processes")
        if status == -signal.SIGXCPU:
            return ChildError(f"needed more than {limits.cpu_s} s of processor time")
        if status == OUT_OF_MEMORY:
            return ChildError(f"needed more than {limits.memory_bytes >> 20} MiB of memory")
        return ChildError(describe_exit(status))

    def kill(self, why: str, after_s: float = 0.0) -> None:
        """Kill the child unless it ends earlier. why: a phrase for `error`."""
        if not self.exited.done():
            self._timers.append(self._loop.call_later(after_s, self._kill, why))

    def close(self) -> None:
        """Kill the child, and close the files."""
        self._kill("was no longer needed")
        self.socket.close()
        self.result.close()

    async def _receive(self) -> bytes:
        try:
            some = await self._loop.sock_recv(self.socket, 1 << 12)
        except ConnectionError:
            some = b""
        self.received += some
        return some

    async def _ended(self) -> None:
        self.kill(DEAF, END_S)
        # Shielded: its end is reported even if its caller stops waiting.
        await asyncio.shield(self.exited)

    def ended(self, code: int | None) -> None:
        """Set `exited`, and close the report."""
        if self.exited.done():
            return
        self.exited.set_result(code)
        self._pool.children.discard(self)
        self._loop.remove_reader(self._report)
        self._report.close()
        self.end_deadline()
        with contextlib.suppress(OSError):  # another process may have its end
            self.socket.shutdown(socket.SHUT_RDWR)

    def _kill(self, why: str) -> None:
        if not self.exited.done():
            self._why = why
            self.ended(None)

    def _on_report(self) -> None:
        code = self._report.recv(REPORT.size)
        if not code:
            self._server.wait()
        self.ended(REPORT.unpack(code)[0] if code else None)


class _ForkServer:
    """A pool's side of its fork server. Raises OSError if it can't start."""

    def __init__(self, module: str, setup: int):
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[bytes] = self._loop.create_future()
        self._output = OutputTail()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                files, stdin = (theirs.fileno(), setup), subprocess.DEVNULL
                self._process = start_child(module, files, self._output, environment(), stdin=stdin)
            except BaseException:
                self._socket.close()
                self._output.close()
                raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._on_ready)

    @property
    def pid(self) -> int | None:
        """Its process id, None if it accepts no requests."""
        ended = self._socket.fileno() < 0 or self._process.poll() is not None
        return None if ended else self._process.pid

    async def until_ready(self) -> None:
        if not await asyncio.shield(self._ready):
            raise OSError("the process that starts it has ended")

    def fork(self, limits: Limits, files: Sequence[int]) -> None:
        """Request the fork of a child with these descriptors; see `Child.exited`."""
        with contextlib.suppress(OSError):  # it has ended
            order = FORK_REQUEST.pack(limits.memory_bytes, limits.cpu_s)
            socket.send_fds(self._socket, [order], files)

    def end(self) -> None:
        """End the process, after its children. Takes some milliseconds."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if not self._ready.done():
            self._ready.set_result(b"")
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # on Linux its children end, too
            self._process.wait()
        self._output.close()

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def output(self) -> str:
        return self._output.read() or "It printed nothing."

    def _on_ready(self) -> None:
        self._loop.remove_reader(self._socket)
        self._ready.set_result(self._socket.recv(1))
