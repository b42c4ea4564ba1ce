"""Work of a child: compile grammars, follow replies in them, write masks of the next tokens."""

import json
import mmap
import os
import resource
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.helpers.grammars import wire

# llguidance does about 50,000 units of lexer fuel, or 20,000 items, in a millisecond, and a state
# takes 1 to 2 kB. With these the costliest grammar of a usual kind takes 10 ms for a mask.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 200,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,  # they would quote the whole grammar
}
COMPILE_CPU_S = 4  # the system ends a child whose COMPILE takes longer
SLOW_MICROS = 500  # answers before an operation that takes this long are sent without it
SHORT_MICROS = 100  # time of an operation that is taken for its CPU time, which takes time to read
_RECEIVED_BYTES, _MOST_FILES = 1 << 16, 16
Rows = NDArray[np.uint32]


def run(tokenizer: Any, vocab_size: int, end_id: int, connection: socket.socket, rows: int) -> None:
    """Do what the caller asks until it disconnects.

    tokenizer: one of llguidance. rows: descriptor of the file of masks, see helpers.grammars.wire.
    """
    _Work(tokenizer, vocab_size, end_id, connection, rows).run()


class _Work:
    """Grammars and matchers of one child, by number."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_id: int, connection: socket.socket, rows: int
    ):
        self._tokenizer, self._end_id, self._connection = tokenizer, end_id, connection
        self._grammars: dict[int, Any] = {}
        self._matchers: dict[int, _Matcher] = {}
        memory = mmap.mmap(rows, os.fstat(rows).st_size)
        os.close(rows)
        words = wire.words_of(vocab_size)
        self._rows: Rows = np.frombuffer(memory, np.uint32).reshape(-1, 2, words)
        self._files: list[int] = []
        self._answers, self._since_ns = bytearray(), 0

    def run(self) -> None:
        self._connection.sendall(wire.HELLO.pack(os.getpid()))
        data, head = b"", wire.OPERATION
        while True:
            some, files, _, _ = socket.recv_fds(self._connection, _RECEIVED_BYTES, _MOST_FILES)
            if not some:
                return
            data, at = data + some, 0
            self._files += files
            self._since_ns = time.process_time_ns()
            while len(data) >= at + head.size:
                operation, matcher, grammar, count = head.unpack_from(data, at)
                begin, end = at + head.size, at + head.size + 4 * count
                if len(data) < end:
                    break
                at = end
                self._obey(operation, matcher, grammar, _tokens(count).unpack_from(data, begin))
            data = data[at:]
            self._send()

    def _obey(self, operation: int, number: int, grammar: int, tokens: Sequence[int]) -> None:
        if operation == wire.END:
            self._matchers.pop(number, None)
            return
        if operation == wire.FORGET:
            self._grammars.pop(grammar, None)
            return
        flags, grown, said, begun_ns = 0, 0, b"", time.perf_counter_ns()
        matcher = None
        try:
            if operation == wire.COMPILE:
                self._send()  # compiling may take long, and others wait for their answers
                before = _resident_kib()
                self._grammars[grammar] = self._compiled()
                grown = max(0, _resident_kib() - before)
            else:
                if operation == wire.BEGIN:
                    rows = self._rows[number]
                    self._matchers[number] = _Matcher(self._grammars[grammar], rows, self._end_id)
                matcher = self._matchers[number]
                if matcher.micros > SLOW_MICROS:
                    self._send()
                flags = matcher.step(tokens)
        # A panic of Rust is not an Exception, and ends this operation alone.
        except BaseException as error:
            text = str(error) if isinstance(error, _UnusableError) else repr(error)
            flags, said = wire.FAILED, text.encode(errors="replace")[: wire.MOST_TEXT_BYTES]
        micros = (time.perf_counter_ns() - begun_ns) // 1000
        if micros > SHORT_MICROS:
            now_ns = time.process_time_ns()
            micros, self._since_ns = min(micros, (now_ns - self._since_ns) // 1000), now_ns
        if matcher is not None:
            matcher.micros = micros
        self._answers += wire.ANSWER.pack(operation, flags, number, micros, grown, len(said)) + said
        if micros > SLOW_MICROS:
            self._send()

    def _send(self) -> None:
        """Send the answers so far: together, as each wakes the caller."""
        if self._answers:
            self._connection.sendall(self._answers)
            self._answers.clear()

    def _compiled(self) -> Any:
        """Compile the grammar of the next file, and try its first mask. Returns its matcher."""
        file = self._files.pop(0)
        given = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        os.close(file)
        with _CpuLimit(COMPILE_CPU_S):
            rules = [self._converted(rule) for rule in given["rules"]]
            matcher = self._matcher(rules)
            if matcher.is_error():
                # Rules that may hold to less do so if they can't be used alone.
                for number, less in given["else"]:
                    if self._matcher([rules[number]]).is_error():
                        rules[number] = {"name": rules[number]["name"], **less}
                matcher = self._matcher(rules)
            if matcher.is_error():
                raise _UnusableError(matcher.get_error())
            mask = np.zeros(self._rows.shape[2], np.uint32)
            matcher.deep_copy().unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return matcher

    def _converted(self, rule: dict[str, Any]) -> dict[str, Any]:
        """Return a rule in llguidance's format, which has no regex."""
        if "regex" not in rule:
            return rule
        import llguidance

        text = llguidance.LLMatcher.grammar_from_regex(rule["regex"])
        return {**json.loads(text)["grammars"][0], "name": rule["name"]}

    def _matcher(self, rules: list[dict[str, Any]]) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(**LIMITS)
        text = json.dumps({"grammars": rules})
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)


class _Matcher:
    """A reply's place in its grammar, and its rows. micros: CPU time of its last operation."""

    def __init__(self, grammar: Any, rows: Rows, end_id: int):
        self._matcher, self.micros = grammar.deep_copy(), 0
        self._mask, self._ends = rows
        self._address, self._size = self._mask.ctypes.data, self._mask.nbytes
        end = np.zeros_like(self._ends)
        end[end_id // 32] = 1 << end_id % 32
        self._keep: Rows | None = None
        if (self._ends != end).any():
            self._keep = ~(self._ends | end)

    def step(self, tokens: Sequence[int]) -> int:
        """Add tokens to the reply, and write the mask of the next one. Returns the flags.

        Raises _UnusableError.
        """
        matcher = self._matcher
        if tokens and not matcher.consume_tokens(tokens):
            raise _UnusableError(matcher.get_error())
        if matcher.is_stopped():
            return wire.STOPPED
        matcher.unsafe_compute_mask_ptr(self._address, self._size)
        if matcher.is_error():
            raise _UnusableError(matcher.get_error())
        # llguidance's mask has the vocabulary's one end where the grammar may end. This reply may
        # have others, and only those.
        if self._keep is not None:
            np.bitwise_and(self._mask, self._keep, out=self._mask)
            if matcher.is_accepting():
                np.bitwise_or(self._mask, self._ends, out=self._mask)
            if not self._mask.any():
                raise _UnusableError("no token is allowed")
        return 0


class _UnusableError(Exception):
    """A grammar can't be used, or its reply can't go on."""


class _CpuLimit:
    """Limit of the CPU time of a `with` block, after which the system ends this process."""

    def __init__(self, seconds: int):
        self._seconds = seconds

    def __enter__(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, self._hard = resource.getrlimit(resource.RLIMIT_CPU)
        most = int(used.ru_utime + used.ru_stime) + 1 + self._seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most, self._hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (self._hard, self._hard))


@cache
def _tokens(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() >> 10
