"""Processes of grammars: what ends, slows or fills one touches nobody else's reply."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron.errors import BusyError, ClosedError, OptionError
from qwen3_omni_neuron.helpers import grammars
from qwen3_omni_neuron.helpers.grammars import CompiledGrammar, GrammarPool
from qwen3_omni_neuron.runtime import thinker_stage
from testing import grammar_faults
from testing.subprocesses import children, open_files, wait_until

pytestmark = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="the extra serve is not installed"
)
LONG_S = 60.0  # for what takes a moment, on a machine that does other things
LEAST = -(2**63)
CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(10_000)) + 'a10000: "x"'
SLOW = {"json_schema": {"type": "integer", "multipleOf": 2**31}}
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN: list[CompiledGrammar] = []  # those of the running test
MakePool = Callable[..., GrammarPool]


@pytest.fixture(scope="module")
def make_pool(omni) -> Iterator[MakePool]:
    """Make pools over the checkpoint's vocabulary, the same where the same is asked for."""
    made: dict[str, GrammarPool] = {}
    vocab_size, end_id = omni._config.thinker.text.vocab_size, omni._config.im_end_id

    def make(server: str = grammars.FORK_SERVER) -> GrammarPool:
        if server not in made:
            read = omni.prompt_builder.tokenizer_json
            made[server] = GrammarPool(read, vocab_size, end_id, server)
        return made[server]

    yield make
    for pool in made.values():
        pool.close()


@pytest.fixture
def pool(make_pool) -> GrammarPool:
    return make_pool()


@pytest.fixture
def faulty(make_pool) -> GrammarPool:
    return make_pool(grammar_faults.MODULE)


def rules_of(rule: dict[str, Any]) -> dict[str, Any]:
    start = {"name": "reply", "lark_grammar": "start: @body"}
    return {"rules": [start, {"name": "body", **rule}], "else": []}


def compiled(pool: GrammarPool, rule: dict[str, Any], **given: Any) -> CompiledGrammar:
    grammar = pool.compile(rules_of(rule), lambda made: made, **given).result(LONG_S)
    BEGUN.append(grammar)
    return grammar


def begun(pool: GrammarPool, rule: dict[str, Any]) -> CompiledGrammar:
    grammar = compiled(pool, rule)
    grammar.ends[:] = 0
    grammar.begin([], 1000)
    return grammar


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while BEGUN:
        BEGUN.pop().close()


def settle(grammar: CompiledGrammar) -> None:
    """Wait until a grammar is not pending."""

    def done() -> bool:
        grammars.wait([grammar], 0.005)
        return not grammar.pending

    wait_until(done)


def first_of(grammar: CompiledGrammar) -> int:
    return int(np.unpackbits(grammar.mask.view(np.uint8), bitorder="little").argmax())


def follow(grammar: CompiledGrammar, most: int) -> list[bytes]:
    """Write a reply's first allowed tokens. Returns the mask of each."""
    masks: list[bytes] = []
    while True:
        settle(grammar)
        if grammar.failure or grammar.stopped or len(masks) == most:
            return masks
        masks.append(grammar.mask.tobytes())
        grammar.push(first_of(grammar), 900)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"json_schema": {"type": "integer", "const": LEAST}}, "its process was ended by SIGSEGV"),
        ({"lark_grammar": CHAIN}, "its process was ended by SIGSEGV"),
        (SLOW, "its process needed more than (4 s of processor time|256 MiB of memory|30 s)"),
    ],
    ids=["least", "chain", "multiple"],
)
def test_what_ends_or_holds_a_compiler_is_refused_and_the_next_grammar_compiles(
    pool, rule, message
) -> None:
    with pytest.raises(OptionError, match=message):
        compiled(pool, rule)
    assert follow(begun(pool, {"regex": "ab"}), 9)


def test_what_fills_the_memory_is_refused_with_the_limit(omni, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "MEMORY_BYTES", 48 << 20)
    text = omni._config.thinker.text
    own = GrammarPool(omni.prompt_builder.tokenizer_json, text.vocab_size, omni._config.im_end_id)
    lark = "start: A\nA: " + '"x"? ' * 20_000
    with pytest.raises(OptionError, match="more than 48 MiB of memory"):
        compiled(own, {"lark_grammar": lark})
    own.close()
    with pytest.raises(ClosedError):
        compiled(own, {"regex": "a"})


def test_a_grammar_that_nobody_waits_for_any_more_ends_its_process(pool) -> None:
    compiled(pool, {"regex": "a"}).close()
    server = pool._pool.pid
    assert server is not None
    wait_until(lambda: len(children(server)) == 1)  # a spare one
    compiling = pool.compile(rules_of(SLOW), lambda made: made)
    time.sleep(0.2)
    compiling.cancel()
    wait_until(lambda: len(children(server)) == 1)
    made = compiled(pool, {"regex": "a"})
    files = open_files()
    BEGUN.clear()
    del made  # whose reply never began
    wait_until(lambda: len(children(server)) == 1 and len(open_files()) < len(files))


def test_one_owner_slow_grammars_keep_no_other_owner_from_compiling(pool, monkeypatch) -> None:
    compiled(pool, {"regex": "a"})
    slow = [pool.compile(rules_of(SLOW), lambda made: made, "a") for _ in range(6)]
    compiled(pool, {"regex": "[ab]{3}"}, owner="b")
    assert not any(one.done() for one in slow)
    monkeypatch.setattr(grammars, "COMPILE_S", 0.1)
    with pytest.raises(BusyError, match="all 4 processes"):
        compiled(pool, {"regex": "[ab]{3}"}, owner="a")
    for one in slow:
        one.cancel()
    server = pool._pool.pid
    assert server is not None
    wait_until(lambda: len(children(server)) == 3)


def test_the_bytes_of_a_grammar_are_admitted_or_it_is_refused(pool) -> None:
    held: list[int] = []
    compiled(pool, {"regex": "a"}, admit=held.append)
    assert len(held) == 1 and held[0] >= 0

    def refuse(size: int) -> None:
        raise MemoryError(f"{size} bytes")

    with pytest.raises(MemoryError, match="bytes"):
        compiled(pool, {"regex": "a"}, admit=refuse)


@pytest.mark.parametrize("what", ["the process", "its fork server"])
def test_a_death_ends_its_replies_and_the_next_grammar_compiles(make_pool, what) -> None:
    pool = make_pool()
    grammar = begun(pool, {"regex": "[a-z]*"})
    follow(grammar, 2)
    server = pool._pool.pid
    assert server is not None
    wait_until(lambda: len(children(server)) == 2)  # this one, and a spare one that came later
    os.kill(min(children(server)) if what == "the process" else server, signal.SIGKILL)
    follow(grammar, 1 << 20)
    said = "SIGKILL" if what == "the process" else "forks those of grammars has ended"
    assert grammar.failure is not None and said in grammar.failure
    assert follow(begun(pool, {"regex": "ab"}), 9)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("slow", "its masks took more than 250 ms of processor time in"),
        ("deaf", "its process closed its connection, but did not end"),
        ("twice", "its process sent an unexpected answer"),
        ("stop", "its process computed no mask for 1 s"),
    ],
)
def test_a_fault_fails_its_own_reply_and_another_goes_on(
    faulty, monkeypatch, fault, message
) -> None:
    if fault == "stop":
        monkeypatch.setattr(grammars, "STUCK_S", 1.0)
    rule = {"regex": "[xy]{9}"}
    expected = follow(begun(faulty, rule), 9)
    other, culprit = begun(faulty, rule), begun(faulty, {"regex": f"{fault}[a-z]{{9}}"})
    masks = follow(other, 1)
    follow(culprit, 9)
    assert culprit.failure is not None and message in culprit.failure
    monkeypatch.undo()
    assert masks + follow(other, 8) == expected and other.failure is None


@pytest.mark.skipif(sys.platform != "linux", reason="files can be sealed on Linux alone")
def test_the_memory_of_masks_can_not_be_cut_short(pool) -> None:
    grammar = begun(pool, {"regex": "[xy]{9}"})
    with pytest.raises(PermissionError):
        os.ftruncate(grammar._child.result.fileno(), 0)


def test_a_wait_for_masks_ends_in_time_and_says_who_was_late(faulty) -> None:
    grammar = begun(faulty, {"regex": "slow[a-z]{9}"})
    follow(grammar, 1)
    grammar.push(first_of(grammar), 900)
    grammars.wait([grammar], 0.0)
    assert grammar.late is False  # it was no step's wait
    grammars.wait([grammar], 0.005)
    assert grammar.late and grammar.pending


OPTIONS: list[dict[str, Any]] = [
    {"grammar": {"regex": "(red|blue) [0-9]{3}\\."}},
    {"grammar": {"regex": "[ab ]{40}"}, "stop": ["b a"]},
    {"grammar": {"json": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 4}}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["regex", "stop", "json"])
def test_a_reply_that_sits_out_steps_is_the_same(omni, monkeypatch, options) -> None:
    """Here no step waits for any mask, beside a free reply that steps on."""
    given = {"seed": 6, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 20, **options}
    expected = omni.generate_audio(HELLO, **given)
    monkeypatch.setattr(thinker_stage, "MASK_WAIT_S", 0.0)
    free = omni.stream_text(HELLO, seed=1, thinker_max_new_tokens=200)
    found = omni.generate_audio(HELLO, **given)
    free.close()
    assert found.token_ids == expected.token_ids and found.text == expected.text
    assert np.array_equal(found.codes, expected.codes)
    assert found.thinker_finish_reason == expected.thinker_finish_reason


def test_a_grammar_that_ends_at_the_limit_of_tokens_ends_by_itself(omni) -> None:
    grammar = {"regex": "[0-9]{3}!"}
    count = len(omni.generate_text(HELLO, seed=3, grammar=grammar).token_ids)
    for most, reason in ((count, "stop"), (count - 1, "length")):
        result = omni.generate_text(HELLO, seed=3, grammar=grammar, thinker_max_new_tokens=most)
        assert (result.thinker_finish_reason, len(result.token_ids)) == (reason, most)
