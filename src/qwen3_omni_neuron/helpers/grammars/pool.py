"""Pool of the processes that hold grammars: who gets one, what is too slow, who ended one."""

import asyncio
import itertools
import json
import select
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from qwen3_omni_neuron.engines.process.child import describe_exit, nameless_file
from qwen3_omni_neuron.errors import BusyError, ClosedError, OptionError, printable
from qwen3_omni_neuron.helpers import orders
from qwen3_omni_neuron.helpers.fair_places import FairPlaces
from qwen3_omni_neuron.helpers.grammars import wire, work
from qwen3_omni_neuron.helpers.grammars.child import MEMORY_BYTES, GrammarChild
from qwen3_omni_neuron.helpers.grammars.kept import KeptGrammars
from qwen3_omni_neuron.helpers.grammars.matcher import CompiledGrammar, Matcher
from qwen3_omni_neuron.helpers.link import ForkServer

FORK_SERVER = "qwen3_omni_neuron.helpers.grammars.server"
TRIES = 2  # grammars that are tried at a time
ALONE = 4  # grammars that have a process to themselves
TRY_S = 0.25  # time for a try, after which a grammar waits for a process to itself
QUICK_CPU_S, SMALL_BYTES = 0.015, 16 << 20  # most of a grammar that shares a process
COMPILE_S = 30.0  # time for compiling, and for the wait for a process
START_S = 120.0  # time for the fork server to make the vocabulary's table
LATE_CPU_S = 0.25  # CPU time of the masks for which steps did not wait, in one reply
BLOCKED_CPU_S = 0.01  # CPU time of a mask after which others leave its process
STUCK_S = 10.0  # time after which a process that does not answer is replaced
CLOSE_S = 2.0
MOST_TEXT = 400
_ALL_IN_USE = f"all {ALONE} processes for large grammars are in use"
Made = TypeVar("Made")
Admit = Callable[[int], object]
"""Function that gets the bytes that a grammar takes, and raises if they don't fit."""


def admit_all(_: int) -> None:
    """Admit every grammar: the default."""


class GrammarPool:
    """Processes that compile grammars and make masks, for one vocabulary. Any thread may use it.

    The processes begin with the first grammar. Those that share a process are kept there a while,
    since most clients send the same one again. A thread with an event loop of its own compiles
    grammars and replaces processes; matchers are asked by the caller's thread itself (`wait`).
    lock: guards everything that the loop and other threads share. words: length of a mask.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_id: int,
        matchers: int,
        server: str = FORK_SERVER,
    ):
        """tokenizer_json: returns the tokenizer in the format of the library `tokenizers`.

        vocab_size: number of logits. end_id: token that ends a turn. matchers: most at a time.
        server: module of the fork server.
        """
        self._module = server
        self.lock, self.words = threading.RLock(), wire.words_of(vocab_size)
        self._tokenizer_json, self._vocab_size, self._end_id = tokenizer_json, vocab_size, end_id
        self._matchers = matchers
        self._numbers = itertools.count(1)
        self._tries, self._alone = FairPlaces(TRIES), FairPlaces(ALONE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: ForkServer | None = None
        self._shared: GrammarChild | None = None
        self._spare: list[GrammarChild] = []
        self._kept = KeptGrammars()
        self._closed = False

    def compile(
        self,
        rules: Mapping[str, Any],
        make: Callable[[CompiledGrammar], Made],
        owner: str = "",
        admit: Admit = admit_all,
    ) -> "Future[Made]":
        """Compile a grammar and try its first mask, in a process that may die.

        rules: "rules", grammars in llguidance's format or {"name", "regex"}, and "else", pairs of a
        rule's number and what it holds to if it can't be used. make: returns the future's result.
        owner: owners take turns. admit: see `Admit`; called in any thread. Cancelling the future
        ends the work.
        The future raises OptionError for a grammar that can't be used or takes too much, BusyError
        where no process can be had, ClosedError, and what `admit` raises.
        """
        text, loop = json.dumps(rules).encode(), self._running_loop()
        known = self._known(text, owner)
        if known is not None:
            return _done(known, make, admit)
        return asyncio.run_coroutine_threadsafe(self._tracked(text, make, owner, admit), loop)

    def wait(self, matchers: Sequence[Matcher], most_s: float) -> None:
        """Send what is to be sent, and wait for the answers of matchers, at most so long.

        Those that are still pending then are late. One whose masks have taken too long fails, and
        the others leave a process that it blocks.
        """
        until_s = time.monotonic() + most_s
        while True:
            with self.lock:
                children = self._exchange(matchers)
            if not children:
                return
            if most_s == 0 or not _readable(children, until_s - time.monotonic()):
                break
        with self.lock:
            pending = [matcher for matcher in matchers if matcher.pending]
            for matcher in pending:
                matcher.late |= most_s > 0
            if any(matcher.late for matcher in pending):
                for child in children:
                    self._judge(child)

    def close(self) -> None:
        """End the processes; compiling raises ClosedError from now on."""
        with self.lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), loop)
            if thread is not threading.current_thread():  # whose garbage collection may call this
                thread.join(CLOSE_S)

    def place(self, matcher: Matcher) -> None:
        """See helpers.grammars.matcher.Places."""
        grammar = matcher.grammar
        child = grammar.own[0] if grammar.own else self._shared
        tried, grammar.tried = grammar.tried, None
        if tried is not None and tried.has_compiled(grammar.number):
            child, matcher.visits = tried, True
        if child is not None and not child.broken:
            matcher.move_to(child)
        else:
            self._soon(self._replay, [matcher])

    def forget(self, number: int, own: list[GrammarChild]) -> None:
        """See helpers.grammars.matcher.Places."""
        with self.lock:
            if self._closed:
                return
            self._forget(self._kept.release(number))
            for child in own:
                self._soon(self._kill, child)
            own.clear()

    # The methods until `_soon` may run in any thread.

    def _known(self, rules: bytes, owner: str) -> tuple[CompiledGrammar, int] | None:
        """Return a grammar that was kept, and its bytes; None where it is not known."""
        with self.lock:
            kept = self._kept.take(owner, rules)
            if kept is None:
                return None
            number, size = kept
            return CompiledGrammar(self, number, rules, [], owner), size

    def _forget(self, numbers: Sequence[int]) -> None:
        """Let the shared child forget grammars. The lock is held."""
        if self._shared is not None:
            self._shared.forget(*numbers)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self._closed:
                raise _closed()
            if self._loop is None:
                try:
                    self._loop = asyncio.new_event_loop()
                except OSError as error:
                    raise _no_process(f": {error}") from error
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="qwen3-omni-grammars", daemon=True
                )
                self._thread.start()
            return self._loop

    def _soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, *arguments)

    # The methods until `_read` run in the loop's thread.

    async def _tracked(
        self, rules: bytes, make: Callable[[CompiledGrammar], Made], owner: str, admit: Admit
    ) -> Made:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return make(await self._compile(rules, owner, admit))
        except asyncio.CancelledError:
            if self._closed:
                raise _closed() from None
            raise
        finally:
            self._tasks.discard(task)

    async def _compile(self, rules: bytes, owner: str, admit: Admit) -> CompiledGrammar:
        number = next(self._numbers)
        async with _place(self._tries, owner):
            child, answer = await self._try(number, rules)
        if answer is not None and _is_quick(answer):
            admit(answer.grown_kib << 10)
            with self.lock:
                self._forget(self._kept.add(owner, rules, number, answer.grown_kib << 10))
                self._sharing().compile(number, rules)
                return CompiledGrammar(self, number, rules, [], owner, child)
        try:
            await asyncio.wait_for(self._alone.take(owner), COMPILE_S)
        except asyncio.TimeoutError:
            raise BusyError(
                f"all {ALONE} processes for large grammars were in use for {COMPILE_S:g} s. Try "
                "again later, or take a simpler grammar or schema."
            ) from None
        child = self._child_alone(owner)
        try:
            answer = await self._compiled(child, number, rules, COMPILE_S)
            if answer is None:
                raise _unusable(f"compiling it takes longer than {COMPILE_S:g} s")
            admit(answer.grown_kib << 10)
        except BaseException:
            self._kill(child)
            raise
        return CompiledGrammar(self, number, rules, [child], owner)

    async def _try(self, number: int, rules: bytes) -> tuple[GrammarChild, wire.Answer | None]:
        """Compile a grammar in a spare child, which knows it until its next try.

        Returns no answer where that takes too long for a try.
        """
        self._spare = [child for child in self._spare if not child.exited.done()]
        child = next((child for child in self._spare if not child.users), None)
        if child is None:
            child = self._new_child()
        else:
            self._spare.remove(child)
            with self.lock:
                child.forget(*child.grammars)
        try:
            return child, await self._compiled(child, number, rules, TRY_S)
        finally:
            if child.asked or child.broken or len(self._spare) >= TRIES:
                self._kill(child)
            else:
                self._spare.append(child)

    async def _compiled(
        self, child: GrammarChild, number: int, rules: bytes, most_s: float
    ) -> wire.Answer | None:
        """Return a child's answer, None where it takes too long or was killed for its memory.

        Raises OptionError where the grammar can't be used, or ended the child.
        """
        assert self._loop is not None
        answered: asyncio.Future[wire.Answer] = self._loop.create_future()
        started = asyncio.Event()

        def read() -> None:
            with self.lock:
                child.read()
            if child.pid is not None:
                started.set()
            if child.broken:
                started.set()
                if not answered.done():
                    answered.set_exception(wire.BrokenChildError())

        def done(_: GrammarChild, answer: wire.Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._loop.add_reader(child.socket, read)
        try:
            if child.pid is None:
                await self._started(started)
            with self.lock:
                child.compile(number, rules, done)
            answer = await asyncio.wait_for(answered, most_s)
        except asyncio.TimeoutError:
            return None
        except wire.BrokenChildError:
            self._kill(child)
            status = await asyncio.shield(child.exited)
            self._refuse_where_closed()
            if status in (None, orders.NO_FORK):
                raise _no_process() from None
            if status == -signal.SIGKILL:  # by the system, for want of memory
                return None
            raise _unusable(_how_it_ended(status)) from None
        finally:
            self._loop.remove_reader(child.socket)
        if answer.flags & wire.FAILED:
            raise _unusable(printable(answer.text, MOST_TEXT))
        return answer

    async def _started(self, started: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(started.wait(), START_S)
        except asyncio.TimeoutError:
            raise _no_process() from None

    def _new_child(self) -> GrammarChild:
        self._refuse_where_closed()
        try:
            if self._server is None or self._server.ended:
                with nameless_file() as file:
                    head = wire.VOCABULARY.pack(self._vocab_size, self._end_id)
                    file.write(head + self._tokenizer_json().encode())
                    self._server = ForkServer(self._module, (file.fileno(),))
            number = next(self._numbers)
            child = GrammarChild(self._server, number, self._matchers, self.words)
        except OSError as error:  # no file or process is left
            raise _no_process(f": {error}") from error
        child.exited.add_done_callback(lambda _: self._on_exit(child))
        return child

    def _child_alone(self, owner: str) -> GrammarChild:
        """Return a new child for one grammar, for which a place was taken."""
        try:
            child = self._new_child()
        except BaseException:
            self._alone.give_back(owner)
            raise
        child.exited.add_done_callback(lambda _: self._alone.give_back(owner))
        return child

    def _sharing(self) -> GrammarChild:
        """Return the child that grammars share. The lock is held."""
        if self._shared is None or self._shared.broken:
            self._shared = self._new_child()
        return self._shared

    def _kill(self, child: GrammarChild) -> None:
        child.broken = True
        child.server.kill(child.number)

    def _on_exit(self, child: GrammarChild) -> None:
        """Move an ended child's matchers to another one, except for the culprit."""
        status = child.exited.result()
        with self.lock:
            child.broken = True
            if self._closed:
                return
            # The operation in progress, unless the fork server ended, with all of its children.
            culprit = child.asked[0].user if child.asked and status is not None else None
            users = list(child.users.values())
            for matcher in users:
                matcher.leave()
                if matcher.grammar.own:
                    matcher.grammar.own.clear()
                    matcher.moved = True
            if isinstance(culprit, Matcher) and culprit in users:
                self._forget(self._kept.drop(culprit.grammar.number))
                if culprit.moved:
                    culprit.fail(_how_it_ended(status))
                culprit.moved = True
            self._replay(users)

    def _replay(self, matchers: Sequence[Matcher]) -> None:
        """Let matchers without a child go on in one, from the tokens so far."""
        with self.lock:
            for matcher in matchers:
                grammar = matcher.grammar
                if matcher.child is not None or matcher.failure is not None or matcher.stopped:
                    continue
                matcher.pending = True
                try:
                    if matcher.moved and not grammar.own:
                        if not self._alone.take_now(grammar.owner):
                            matcher.fail(_ALL_IN_USE)
                            continue
                        grammar.own.append(self._child_alone(grammar.owner))
                    matcher.move_to(grammar.own[0] if grammar.own else self._sharing())
                except Exception as error:
                    matcher.fail(str(error))

    def _isolate(self, child: GrammarChild, culprit: Matcher) -> None:
        """Leave a child to the matcher that blocks it; the others go on in another one."""
        with self.lock:
            if child.broken or culprit.child is not child:
                self._kill(child)  # `_on_exit` does what follows
                return
            others = [matcher for matcher in child.users.values() if matcher is not culprit]
            for matcher in others:
                matcher.leave()
            self._replay(others)
            grammar = culprit.grammar
            self._forget(self._kept.drop(grammar.number))
            if self._alone.take_now(grammar.owner):
                grammar.own.append(child)
                child.exited.add_done_callback(lambda _: self._alone.give_back(grammar.owner))
            else:
                culprit.fail(_ALL_IN_USE)
                self._kill(child)

    def _refuse_where_closed(self) -> None:
        if self._closed:
            raise _closed()

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._server is not None:
            self._server.end()
        assert self._loop is not None
        self._loop.stop()

    # The methods below run in the thread that waits for masks.

    def _exchange(self, matchers: Sequence[Matcher]) -> set[GrammarChild]:
        """Send and read. Return the children of whom an answer is missing. The lock is held."""
        children = _asked(matchers)
        for child in children:
            child.flush()
            child.read()
            if child.broken:
                self._soon(self._kill, child)  # `_on_exit` does what follows
        return _asked(matchers)

    def _judge(self, child: GrammarChild) -> None:
        """Look at a child whose answer is late: is one matcher at fault?"""
        cpu_s, waited_s = child.late_s()
        culprit = child.asked[0].user if child.asked else None
        if waited_s > STUCK_S:
            self._soon(self._kill, child)
        elif isinstance(culprit, Matcher) and culprit.child is child:
            if culprit.late and culprit.late_cpu_s + cpu_s > LATE_CPU_S:
                culprit.fail(
                    f"its masks took more than {1000 * LATE_CPU_S:g} ms of a processor's time "
                    "beside the model's steps"
                )
                self._soon(self._kill, child)
            elif cpu_s > BLOCKED_CPU_S and self._shared is child:
                self._shared = None
                self._soon(self._isolate, child, culprit)


def _asked(matchers: Sequence[Matcher]) -> set[GrammarChild]:
    """Return the children that answer some of the matchers."""
    return {m.child for m in matchers if m.pending and m.child is not None and not m.child.broken}


def _readable(children: Iterable[GrammarChild], most_s: float) -> bool:
    """Wait at most so long until one of the children has answered. Returns whether one has."""
    poll = select.poll()
    for child in children:
        poll.register(child.socket, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * most_s)))


def _done(
    known: tuple[CompiledGrammar, int], make: Callable[[CompiledGrammar], Made], admit: Admit
) -> "Future[Made]":
    """Return a future that has ended, of a grammar that was kept. See GrammarPool.compile."""
    (grammar, size), future = known, Future[Made]()
    try:
        admit(size)
        future.set_result(make(grammar))
    except Exception as error:
        grammar.close()
        future.set_exception(error)
    return future


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


@asynccontextmanager
async def _place(places: FairPlaces, owner: str) -> AsyncIterator[None]:
    await places.take(owner)
    try:
        yield
    finally:
        places.give_back(owner)


def _is_quick(answer: wire.Answer) -> bool:
    quick = answer.micros <= 1e6 * QUICK_CPU_S
    return quick and answer.grown_kib <= SMALL_BYTES >> 10


def _unusable(reason: str) -> OptionError:
    return OptionError(
        f"the grammar or schema can't be used: {reason}. Take a simpler one, or without what is "
        "not supported."
    )


def _how_it_ended(status: int | None) -> str:
    """Return what a child's end says of its grammar."""
    if status == -signal.SIGXCPU:
        return f"compiling it takes more than {work.COMPILE_CPU_S} s of a processor's time"
    if status in (-signal.SIGABRT, orders.OUT_OF_MEMORY):
        return f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
    return f"its process {describe_exit(status)}"


def _no_process(why: str = "") -> BusyError:
    return BusyError(f"no process could be had to compile the grammar{why}. Try again later.")


def _closed() -> ClosedError:
    return ClosedError("the model was closed.")
