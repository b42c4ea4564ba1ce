"""A compiled grammar of one reply, and the reply's place in it."""

import threading
from collections.abc import Sequence
from typing import Protocol

from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.helpers.grammars import wire
from qwen3_omni_neuron.helpers.grammars.child import Asked, GrammarChild, Mask


class Places(Protocol):
    """The pool, as grammars and matchers use it."""

    lock: threading.RLock
    words: int

    def place(self, matcher: "Matcher") -> None:
        """Give a matcher without a child a place in one, now or soon. The lock is held."""
        ...

    def forget(self, number: int, child: "list[GrammarChild]") -> None:
        """Free a grammar. child: the one that it has to itself, if any."""
        ...

    def wait(self, matchers: "Sequence[Matcher]", most_s: float) -> None:
        """See GrammarPool.wait."""
        ...


class CompiledGrammar:
    """Grammar that was compiled and tried, for one reply.

    number, rules: its number, and the rules as JSON. own: the child that it has to itself, or
    empty. owner: who takes turns for such children. tried: the child that has compiled it for a
    try, which makes its first mask while the child that grammars share compiles it.
    """

    def __init__(
        self,
        pool: Places,
        number: int,
        rules: bytes,
        own: list[GrammarChild],
        owner: str,
        tried: GrammarChild | None = None,
    ):
        self.pool, self.number, self.rules = pool, number, rules
        self.own, self.owner, self.tried = own, owner, tried
        self._freed = finalize(self, pool.forget, number, own)

    def matcher(self, ends: Mask) -> "Matcher":
        """Return a reply's place in the grammar. ends: tokens that end the reply, as bits."""
        return Matcher(self, ends)

    def close(self) -> None:
        """Free it, and end the process that it has to itself."""
        self._freed()


class Matcher:
    """Place of one reply in its grammar, which a child knows. The pool's lock guards all fields.

    pending: whether an answer is still to come; the others are valid where it is False. mask: bits
    of the tokens that may come next, in memory that its process writes. stopped: the grammar ends
    with the last token. failure: why it can't go on, None where it can. tokens: those since it
    began, from which another child can go on. late: whether a step was taken without it.
    late_cpu_s: CPU time of its late masks. visits: its child has tried the grammar, and makes one
    mask.
    """

    def __init__(self, grammar: CompiledGrammar, ends: Mask):
        self.grammar, self._ends, self._pool = grammar, ends, grammar.pool
        self.child: GrammarChild | None = None
        self.slot = self.asked = 0
        self.tokens: list[int] = []
        self.pending = self.stopped = self.late = self.moved = self.visits = False
        self.failure: str | None = None
        self.mask: Mask | None = None
        self.late_cpu_s = 0.0

    def begin(self, token_ids: Sequence[int]) -> None:
        """Begin the grammar, anew if need be, with the tokens that follow its beginning."""
        with self._pool.lock:
            self.tokens, self.pending, self.stopped = list(token_ids), True, False
            if self.child is None:
                self._pool.place(self)
            else:
                self._begin(self.child)

    def push(self, token_id: int) -> None:
        """Add a token. It is sent by the next `GrammarPool.wait`."""
        with self._pool.lock:
            if self.failure is not None:
                return
            self.tokens.append(token_id)
            self.pending = True
            if self.visits:
                self.leave()
                self._pool.place(self)
            elif self.child is not None:
                self.child.step(self._asked(wire.STEP), token_id)

    def move_to(self, child: GrammarChild) -> None:
        """Go on in a child: compile the grammar there if need be, and send the tokens so far."""
        if self.grammar.number not in child.grammars:
            child.compile(self.grammar.number, self.grammar.rules)
        self.child, self.slot, self.asked = child, child.free.pop(), 0
        child.users[self.slot] = self
        self.mask, child.rows[self.slot, 1] = child.rows[self.slot, 0], self._ends
        self._begin(child)
        child.flush()

    def leave(self) -> None:
        """Leave the child. The lock is held."""
        child, self.child, self.visits = self.child, None, False
        if child is not None:
            del child.users[self.slot]
            child.free.append(self.slot)
            child.tell(wire.END, self.slot, 0)

    def fail(self, reason: str) -> None:
        """End with a failure. The lock is held."""
        self.failure, self.pending = reason, False
        self.leave()

    def close(self) -> None:
        """Free it, and its grammar."""
        with self._pool.lock:
            self.stopped = True  # if it waits for a place in a child, it gets none
            self.leave()
        self.grammar.close()

    def _begin(self, child: GrammarChild) -> None:
        child.begin(self._asked(wire.BEGIN), self.grammar.number, self.tokens)

    def _asked(self, operation: int) -> Asked:
        self.asked += 1
        return Asked(operation, self.slot, self, self._answered)

    def _answered(self, child: GrammarChild, answer: wire.Answer) -> None:
        if self.child is not child or answer.matcher != self.slot:  # it has moved, or was freed
            return
        if self.late:
            self.late_cpu_s, self.late = self.late_cpu_s + answer.micros / 1e6, False
        # Another operation of it may follow in the queue, whose answer then counts.
        self.asked -= 1
        self.pending = self.asked > 0
        if answer.flags & wire.FAILED:
            self.fail(answer.text)
        elif answer.flags & wire.STOPPED:
            self.stopped = True
