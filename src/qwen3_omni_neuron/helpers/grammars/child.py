"""The caller's side of one child: operations out, answers in, masks in memory that both have."""

import fcntl
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.engines.process.child import nameless_file
from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.helpers.grammars import wire
from qwen3_omni_neuron.helpers.link import ForkServer

MEMORY_BYTES = 256 << 20  # address space of a child, beyond that at its start
NO_CPU_LIMIT_S = 1 << 31
_RECEIVED_BYTES = 1 << 12
_PROCESS_CLOCK = 2  # in the kernel's number of another process's CPU clock
Mask = NDArray[np.uint32]
Done = Callable[["GrammarChild", wire.Answer], None]


class Asked(NamedTuple):
    """An operation that is not answered yet. user: what asked; None where nothing waits for it."""

    operation: int
    number: int
    user: Any
    done: Done


def _ignore(child: "GrammarChild", answer: wire.Answer) -> None:
    """Take no notice: a grammar that was tried compiles, else its BEGIN fails."""


class GrammarChild:
    """A child as its caller sees it. The pool's lock guards every field.

    server, number: its fork server, and its number there. exited: its return code, see
    ForkServer.fork. pid: None until it has started. free: numbers of matchers that it has rows for.
    users: matchers in it, by number. grammars: numbers of grammars that were sent to it. asked:
    operations without an answer, the one in progress first. broken: it is used no more.
    """

    def __init__(self, server: ForkServer, number: int, matchers: int, words: int):
        self.server, self.number = server, number
        self.socket, theirs = socket.socketpair()
        finalize(self, self.socket.close)
        self.socket.setblocking(False)
        with theirs, nameless_file() as file:
            os.ftruncate(file.fileno(), 8 * matchers * words)
            if sys.platform == "linux":  # a file that is cut short kills those that have mapped it
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            rows = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint32)
            self.rows = rows.reshape(matchers, 2, words)
            files = (theirs.fileno(), file.fileno())
            self.exited = server.fork(number, MEMORY_BYTES, NO_CPU_LIMIT_S, files)
        self.pid: int | None = None
        self.free, self.users = list(range(matchers)), dict[int, Any]()
        self.grammars = set[int]()
        self.asked = deque[Asked]()
        self.broken = False
        self._out, self._received = bytearray(), bytearray()
        # The operation that was first seen to be late, and CPU time and time at that moment.
        self._late: tuple[Asked, float, float] | None = None

    def compile(self, grammar: int, rules: bytes, done: Done = _ignore) -> None:
        """Send a grammar. rules: JSON. done: called with the answer."""
        self.grammars.add(grammar)
        self.flush()
        head = wire.OPERATION.pack(wire.COMPILE, 0, grammar, 0)
        self.asked.append(Asked(wire.COMPILE, 0, None, done))
        try:
            with nameless_file() as file:
                file.write(rules)
                whole = socket.send_fds(self.socket, [head], [file.fileno()]) == len(head)
        except OSError:
            whole = False
        self.broken |= not whole or bool(self._out)

    def forget(self, *grammars: int) -> None:
        """Forget those grammars that were sent to it."""
        for grammar in self.grammars.intersection(grammars):
            self.grammars.remove(grammar)
            self.tell(wire.FORGET, 0, grammar)

    def has_compiled(self, grammar: int) -> bool:
        """True where it has a grammar compiled, and nothing else to do."""
        return grammar in self.grammars and not self.asked and not self.broken

    def begin(self, asked: Asked, grammar: int, tokens: Sequence[int]) -> None:
        """Add a BEGIN to what `flush` sends."""
        self.tell(wire.BEGIN, asked.number, grammar, tokens)
        self.asked.append(asked)

    def step(self, asked: Asked, token_id: int) -> None:
        """Add a STEP to what `flush` sends."""
        self._out += wire.STEP_WITH_TOKEN.pack(wire.STEP, asked.number, 0, 1, token_id)
        self.asked.append(asked)

    def tell(self, operation: int, number: int, grammar: int, tokens: Sequence[int] = ()) -> None:
        """Add an operation without an answer to what `flush` sends."""
        self._out += wire.OPERATION.pack(operation, number, grammar, len(tokens))
        if tokens:
            self._out += struct.pack(f"<{len(tokens)}i", *tokens)

    def flush(self) -> None:
        """Send what the connection takes now."""
        if self._out and not self.broken:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                pass
            except OSError:
                self.broken = True

    def read(self) -> None:
        """Take the answers that have come. Sets `broken` if the child has ended or misbehaves."""
        try:
            some = self.socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        if not some:
            self.broken = True
            return
        self._received += some
        if self.pid is None:
            if len(self._received) < wire.HELLO.size:
                return
            (self.pid,) = wire.HELLO.unpack_from(self._received)
            del self._received[: wire.HELLO.size]
        try:
            for answer in wire.read_answers(self._received):
                asked = self.asked.popleft() if self.asked else None
                if asked is None or asked[:2] != (answer.operation, answer.matcher):
                    raise wire.BrokenChildError("it answers what was not asked")
                asked.done(self, answer)
        except wire.BrokenChildError:
            self.broken = True

    def late_s(self) -> tuple[float, float]:
        """Return how long the operation in progress has taken since the first such question.

        Seconds of the child's CPU time, and seconds.
        """
        if not self.asked or self.pid is None:
            return 0.0, 0.0
        try:
            cpu_s, now = cpu_s_of(self.pid), time.monotonic()
        except OSError:  # it has ended
            return 0.0, 0.0
        if self._late is None or self._late[0] is not self.asked[0]:
            self._late = self.asked[0], cpu_s, now
        return cpu_s - self._late[1], now - self._late[2]


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process; elsewhere than on Linux, time as it passes."""
    if sys.platform != "linux":
        return time.monotonic()
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
