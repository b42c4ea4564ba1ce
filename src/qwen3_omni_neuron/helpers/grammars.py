"""Grammars of replies, each compiled and followed in its own process."""

import asyncio
import json
import mmap
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.errors import BusyError, ClosedError, OptionError, printable
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.grammar_work import BEGIN, OPERATION, SETUP, STEP, words_of
from qwen3_omni_neuron.helpers.pool import DEAF, END_S, Child, ChildError, Limits, Pool

FORK_SERVER = "qwen3_omni_neuron.helpers.grammar_work"
MEMORY_BYTES = 256 << 20  # address space of a process, beyond its initial one
COMPILERS = 4  # concurrent compiles
COMPILE_CPU_S, COMPILE_S = 4, 30.0  # CPU time, and time including the wait for a place
LATE_CPU_S = 0.25  # CPU time of the masks that steps did not wait for, in one reply
STUCK_S = 10.0  # time for a mask
CLOSE_S = 2.0
MOST_TEXT = 400  # characters of a reason
Result = TypeVar("Result")
Mask = NDArray[np.uint32]
Admit = Callable[[int], object]
"""Callback that gets the bytes of a grammar, and raises if they don't fit."""


def admit_all(_: int) -> None:
    """Admit every grammar."""


class CompiledGrammar:
    """Compiled grammar of one reply, and the reply's place in it. Any thread may close it.

    mask: bits of the allowed next tokens, uint32 [words], in memory that its process writes. ends:
    bits of the tokens that end the reply, set before `begin`. stopped: the grammar ends with the
    last token. closed: the limit has excluded tokens that the grammar allows. failure: why the
    reply can't continue. Not valid while `pending`. late: a step did not wait for its mask.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, child: Child, words: int):
        self._loop, self._child = loop, child
        rows = np.frombuffer(mmap.mmap(child.result.fileno(), 8 * words), np.uint32)
        self.mask, self.ends = rows.reshape(2, words)
        self._lock = threading.Lock()  # guards the connection
        self._out, self._asked, self._sent_s = bytearray(), 0, 0.0
        self._connected, self._late_s = True, 0.0
        self.stopped = self.closed = self.late = False
        self.failure: str | None = None
        self._freed = finalize(self, _soon, loop, child.close)

    @property
    def pending(self) -> bool:
        """True while a mask is still to come."""
        return self._asked > 0 and self.failure is None

    def begin(self, token_ids: Sequence[int], left: int) -> None:
        """Begin or restart the grammar with its first tokens.

        left: number of tokens up to the reply's limit.
        """
        self.stopped = False
        self._ask(BEGIN, token_ids, left)
        with self._lock:
            self._flush()

    def push(self, token_id: int, left: int) -> None:
        """Add a token, to be sent by the next `wait`; see `begin`."""
        self._ask(STEP, (token_id,), left)

    def exchange(self) -> bool:
        """Send and receive without waiting. Returns whether a mask may still come."""
        with self._lock:
            if not self.pending:
                return False
            if self._connected:
                self._flush()
                self._receive()
            if self.pending and self._child.exited.done():
                self.failure = _how(self._child, self._child.error)
            open_one = self.pending and self._connected
            if open_one and time.monotonic() - self._sent_s > STUCK_S:
                self._kill(f"computed no mask for {STUCK_S:g} s")
            return open_one

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self._child.socket.fileno()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._connected = False
            self.failure = self.failure or "it was closed"
        self._freed()

    def _ask(self, operation: int, token_ids: Sequence[int], left: int) -> None:
        self._asked += 1
        count = len(token_ids)
        self._out += OPERATION.pack(operation, left, count) + struct.pack(f"<{count}i", *token_ids)

    def _flush(self) -> None:
        with suppress(OSError):  # it is full, or has ended
            while self._out:
                self._sent_s = time.monotonic()
                del self._out[: self._child.socket.send(self._out)]

    def _receive(self) -> None:
        try:
            some = self._child.socket.recv(1 << 12)
            if not some:
                raise ConnectionError
            self._child.received += some
            while (answer := wire.next_answer(self._child.received)) is not None:
                self._take(answer)
        except BlockingIOError:
            return
        except wire.BrokenAnswerError as error:
            self._kill(f"sent {error}")
        except OSError:
            self._kill(DEAF, END_S)

    def _take(self, answer: wire.Answer) -> None:
        if not self._asked or answer.kind not in (wire.MASK, wire.ENDED, wire.ERROR):
            raise wire.BrokenAnswerError("an unexpected answer")
        self._asked -= 1
        self.stopped = answer.kind == wire.ENDED
        self.closed |= bool(answer.numbers[1])
        if answer.kind == wire.ERROR:
            self.failure = str(answer.error)
        if self.late:
            self._late_s, self.late = self._late_s + answer.numbers[0], False
        if self._late_s > LATE_CPU_S:
            self.failure = (
                f"its masks took more than {1000 * LATE_CPU_S:g} ms of processor time in addition "
                "to the model's steps"
            )

    def _kill(self, why: str, after_s: float = 0.0) -> None:
        """Disconnect, so that the process ends; `exchange` then gets the reason."""
        self._connected = False
        _soon(self._loop, self._child.kill, why, after_s)


def wait(grammars: Sequence[CompiledGrammar], most_s: float) -> None:
    """Receive the masks of grammars; after `most_s` seconds the missing ones are late."""
    until_s = time.monotonic() + most_s
    while open_ones := [grammar for grammar in grammars if grammar.exchange()]:
        left_s = until_s - time.monotonic()
        poll = select.poll()
        with suppress(ValueError):  # another thread has closed one
            for grammar in open_ones:
                poll.register(grammar, select.POLLIN)
        if most_s == 0 or left_s <= 0 or not poll.poll(1000 * left_s):
            break
    for grammar in grammars:
        grammar.late |= most_s > 0 and grammar.pending


class GrammarPool:
    """Processes of grammars for one vocabulary, in their own event loop. Thread-safe.

    tokenizer_json: returns the tokenizer in `tokenizers` format. vocab_size: number of logits.
    end_id: token that ends a turn. server: module of the fork server.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_id: int,
        server: str = FORK_SERVER,
    ):
        def setup() -> bytes:
            return SETUP.pack(vocab_size, end_id) + tokenizer_json().encode()

        self._words = words_of(vocab_size)
        limits = Limits(MEMORY_BYTES, COMPILE_CPU_S, COMPILE_S)
        self._pool = Pool(server, "grammar", limits, COMPILERS, setup, spare=True)
        self.lock = threading.Lock()  # guards the loop's start and end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def compile(
        self,
        rules: Mapping[str, Any],
        make: Callable[[CompiledGrammar], Result],
        owner: str = "",
        admit: Admit = admit_all,
    ) -> "Future[Result]":
        """Compile a grammar and try its first mask. Cancelling the future ends the work.

        rules: "rules", grammars in llguidance's format or {"name", "regex"}, and "else", pairs of a
        rule's number and its lenient alternative. make: returns the future's result. owner: owners
        take turns. admit: called in another thread.
        The future raises OptionError for a grammar that can't be used or exceeds a limit, BusyError
        if no process is available, ClosedError, and errors of `admit`.
        """
        task = self._compile(json.dumps(rules).encode(), make, owner, admit)
        try:
            return asyncio.run_coroutine_threadsafe(task, self._running_loop())
        except BaseException:
            task.close()
            raise

    def close(self) -> None:
        """End the processes; compiling then raises ClosedError."""
        with self.lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), loop)
            if thread is not threading.current_thread():  # its garbage collection may call this
                thread.join(CLOSE_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self._closed:
                raise ClosedError("this model was closed; load it again.")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_run, args=(loop,), name="qwen3-omni-grammars", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # no more threads
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return self._loop

    # The following run in the loop's thread.

    async def _compile(
        self, rules: bytes, make: Callable[[CompiledGrammar], Result], owner: str, admit: Admit
    ) -> Result:
        pool, size = self._pool, 8 * self._words
        try:
            async with pool.places.place(owner, COMPILE_S), pool.child(rules, size) as child:
                try:
                    answer = await child.answer(wire.COMPILED)
                except OptionError as error:
                    raise _unusable(printable(str(error), MOST_TEXT)) from None
                except ChildError as error:
                    raise _unusable(_how(child, error)) from None
                child.end_deadline()
                admit(answer.whole[0])
                return make(CompiledGrammar(asyncio.get_running_loop(), child, self._words))
        except asyncio.TimeoutError:
            raise BusyError(
                f"all {COMPILERS} processes that compile grammars were in use for {COMPILE_S:g} s. "
                "Try again later."
            ) from None

    async def _end(self) -> None:
        await self._pool.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        asyncio.get_running_loop().stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call, *arguments)


def _how(child: Child, error: Exception) -> str:
    if not isinstance(error, ChildError):
        return "the process that forks those of grammars has ended"
    # llguidance aborts if it gets no memory.
    if child.exited.done() and child.exited.result() == -signal.SIGABRT:
        return f"its process needed more than {MEMORY_BYTES >> 20} MiB of memory"
    return f"its process {error}"


def _unusable(reason: str) -> OptionError:
    return OptionError(
        f"the grammar or schema can't be used: {reason}. Simplify it, or remove the unsupported "
        "parts."
    )
