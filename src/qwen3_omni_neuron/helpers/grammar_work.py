"""Work of a grammar's process: compile it, follow its reply, write masks of the next tokens."""

import json
import mmap
import os
import resource
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.grammar_end import Closer

NICENESS = 19  # masks are computed in pauses of the engines' threads
SETUP = struct.Struct("<II")
"""Head of the fork server's file: number of logits, token that ends a turn; then JSON."""
OPERATION = struct.Struct("<BII")
"""BEGIN or STEP, number of tokens up to the reply's limit, and of int32 tokens that follow.

Each gets one answer, in order: its processor time, and 1 once the limit has closed the reply.
"""
BEGIN, STEP = 1, 2
# llguidance does about 50,000 units of lexer fuel, or 20,000 items, in a millisecond; a state takes
# 1 to 2 kB. With these the costliest usual grammar takes 10 ms for a mask.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 200,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,  # they quote the whole grammar
}


def main(control: int, setup: int, parent: int) -> None:
    """Serve until the pool disconnects; see helpers.fork_server.serve."""
    serve(control, setup, parent, NICENESS, prepare)


def prepare(setup: int) -> Run:
    """Build the vocabulary's table, which takes seconds; return a child's function."""
    import llguidance

    data = os.pread(setup, os.fstat(setup).st_size, 0)
    vocab_size, end_id = SETUP.unpack_from(data)
    made = _without_names(data[SETUP.size :].decode())
    tokenizer = llguidance.LLTokenizer(json.dumps(made), n_vocab=vocab_size, eos_token=end_id)
    return partial(run, tokenizer, Closer(made["model"]["vocab"]), vocab_size, end_id)


def _without_names(text: str) -> dict[str, Any]:
    """Return a tokenizer that encodes text as its bytes: not normalised, no special tokens by name.

    The added tokens become tokens of the vocabulary that no merge produces. llguidance puts the
    byte 255, which UTF-8 does not have, before a special token's name.
    """
    tokenizer = json.loads(text)
    vocabulary, symbols = tokenizer["model"]["vocab"], ByteLevel(False, use_regex=False)
    for token in tokenizer["added_tokens"]:
        name = token["content"]
        special = token["special"] or (name.startswith("<") and name.endswith(">"))
        vocabulary.pop(name, None)
        ((spelled, _),) = symbols.pre_tokenize_str(name)
        vocabulary["\u00ff" * special + spelled] = token["id"]
    return {**tokenizer, "added_tokens": [], "normalizer": None}


def words_of(vocab_size: int) -> int:
    """Return the length of a mask: uint32 words."""
    return (vocab_size + 31) // 32


def run(
    tokenizer: Any, closer: Closer, vocab_size: int, end_id: int, channel: wire.Channel, result: int
) -> None:
    """Compile a grammar and follow its reply until the pool disconnects.

    tokenizer: llguidance's. The job is the rules, as JSON. result: file of two rows of bits, the
    mask and the tokens that end the reply.
    Raises OptionError if the grammar can't be used or continued.
    """
    memory = mmap.mmap(result, 8 * words_of(vocab_size))
    rows = np.frombuffer(memory, np.uint32).reshape(2, -1)
    matcher = Matcher(tokenizer, closer, end_id, rows)
    try:
        matcher.compile([{"name": "reply", "json_schema": {"type": "object"}}], [])  # warms up
        rules, _ = channel.job()
        given = json.loads(rules)
        before = _resident_bytes()
        matcher.compile(given["rules"], given["else"])
        channel.send(wire.COMPILED, max(0, _resident_bytes() - before))
        # From now on only this process's reply waits for it.
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))
        while True:
            operation, left, count = OPERATION.unpack(channel.receive(OPERATION.size))
            tokens = struct.unpack(f"<{count}i", channel.receive(4 * count))
            begun_s = time.process_time()
            if operation == BEGIN:
                matcher.begin()
            kind = wire.MASK if matcher.step(tokens, left) else wire.ENDED
            channel.send(kind, time.process_time() - begun_s, closer.closed)
    except EOFError:
        return
    except (OptionError, MemoryError):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise OptionError(repr(error)) from error


class Matcher:
    """A reply's place in its grammar. rows: its mask, and bits of the tokens that end the reply."""

    def __init__(self, tokenizer: Any, closer: Closer, end_id: int, rows: NDArray[np.uint32]):
        self._tokenizer, self._closer = tokenizer, closer
        self._mask, self._ends = rows
        self._address, self._size = self._mask.ctypes.data, self._mask.nbytes
        self._end = np.zeros_like(self._ends)
        self._end[end_id // 32] = 1 << end_id % 32
        self._keep: NDArray[np.uint32] | None = None
        self._compiled: Any = None
        self._matcher: Any = None

    def compile(self, rules: list[dict[str, Any]], lenient: list[Any]) -> None:
        """Compile rules, and try the first mask. See GrammarPool.compile. Raises OptionError."""
        rules = [_converted(rule) for rule in rules]
        matcher = self._of(rules)
        if matcher.is_error():
            # Rules with a lenient alternative use it if they can't be compiled.
            for number, less in lenient:
                if self._of([rules[number]]).is_error():
                    rules[number] = {"name": rules[number]["name"], **less}
            matcher = self._of(rules)
        _check(matcher)
        matcher.deep_copy().unsafe_compute_mask_ptr(self._address, self._size)
        self._compiled = matcher

    def begin(self) -> None:
        """Begin or restart the reply."""
        self._matcher = self._compiled.deep_copy()
        self._closer.begin()
        own = bool((self._ends != self._end).any())
        self._keep = ~(self._ends | self._end) if own else None

    def step(self, tokens: Sequence[int], left: int) -> bool:
        """Add tokens to the reply, and write the mask of the next one. Raises OptionError.

        left: number of tokens up to the reply's limit.
        Returns False, and no mask, if the grammar has ended.
        """
        matcher = self._matcher
        if tokens and not matcher.consume_tokens(tokens):
            raise OptionError(matcher.get_error())
        if matcher.is_stopped():
            return False
        matcher.unsafe_compute_mask_ptr(self._address, self._size)
        _check(matcher)
        # llguidance's mask allows the vocabulary's only end token where the grammar may end. This
        # reply's end tokens may differ.
        if self._keep is not None:
            np.bitwise_and(self._mask, self._keep, out=self._mask)
            if matcher.is_accepting():
                np.bitwise_or(self._mask, self._ends, out=self._mask)
            if not self._mask.any():
                raise OptionError("no token is allowed")
        self._closer.narrow(matcher, tokens, left, self._mask, self._ends)
        return True

    def _of(self, rules: list[dict[str, Any]]) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(**LIMITS)
        text = json.dumps({"grammars": rules})
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise OptionError(matcher.get_error())


def _converted(rule: dict[str, Any]) -> dict[str, Any]:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "gbnf" in rule:
        return {"lark_grammar": gbnf_to_lark(rule["gbnf"]), "name": rule["name"]}
    if "regex" not in rule:
        return rule
    text = llguidance.LLMatcher.grammar_from_regex(rule["regex"])
    return {**json.loads(text)["grammars"][0], "name": rule["name"]}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
