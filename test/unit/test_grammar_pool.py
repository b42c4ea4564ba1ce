"""Processes that hold grammars: what ends, slows or fills one touches nobody else's reply."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, BinaryIO
from unittest.mock import Mock

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.engines.process.child import nameless_file
from qwen3_omni_neuron.errors import ClosedError, OptionError
from qwen3_omni_neuron.helpers.grammars import child as child_module
from qwen3_omni_neuron.helpers.grammars import kept as kept_module
from qwen3_omni_neuron.helpers.grammars import pool as pool_module
from qwen3_omni_neuron.helpers.grammars.matcher import CompiledGrammar, Matcher
from qwen3_omni_neuron.helpers.grammars.pool import GrammarPool
from qwen3_omni_neuron.runtime import thinker_stage
from qwen3_omni_neuron.runtime.grammar import Grammar
from testing import grammar_faults

pytestmark = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="the extra serve is not installed"
)
LONG_S = 60.0  # for what takes a moment, on a machine that does other things
LEAST = -(2**63)
SLOW = {"json_schema": {"type": "integer", "multipleOf": 2**31}}
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN: list[Matcher] = []  # those of the running test
MakePool = Callable[..., GrammarPool]


@pytest.fixture(scope="module")
def make_pool(omni: Qwen3Omni) -> Iterator[MakePool]:
    """Make pools over the checkpoint's vocabulary, the same where the same is asked for."""
    made: dict[Any, GrammarPool] = {}
    vocab_size, end_id = omni._config.thinker.text.vocab_size, omni._config.im_end_id

    def make(server: str = pool_module.FORK_SERVER) -> GrammarPool:
        if server not in made:
            read = omni.prompt_builder.tokenizer_json
            made[server] = GrammarPool(read, vocab_size, end_id, 8, server)
        return made[server]

    yield make
    for pool in made.values():
        pool.close()


@pytest.fixture
def pool(make_pool: MakePool) -> GrammarPool:
    return make_pool()


@pytest.fixture
def faulty(make_pool: MakePool) -> GrammarPool:
    return make_pool(grammar_faults.MODULE)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes of the lowest priority take their time beside others."""
    monkeypatch.setattr(pool_module, "TRY_S", LONG_S)
    monkeypatch.setattr(pool_module, "STUCK_S", LONG_S)


def rules_of(rule: dict[str, Any]) -> dict[str, Any]:
    start = {"name": "reply", "lark_grammar": "start: @body"}
    return {"rules": [start, {"name": "body", **rule}], "else": []}


def compiled(pool: GrammarPool, rule: dict[str, Any], **given: Any) -> CompiledGrammar:
    return pool.compile(rules_of(rule), lambda made: made, **given).result(LONG_S)


def begun(pool: GrammarPool, rule: dict[str, Any]) -> Matcher:
    matcher = compiled(pool, rule).matcher(np.zeros(pool.words, np.uint32))
    matcher.begin([])
    BEGUN.append(matcher)
    return matcher


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while BEGUN:
        BEGUN.pop().close()


def settle(pool: GrammarPool, *matchers: Matcher) -> None:
    """Wait until no matcher is pending."""
    until_s = time.monotonic() + LONG_S
    while any(matcher.pending for matcher in matchers):
        pool.wait(matchers, 0.005)
        assert time.monotonic() < until_s
        time.sleep(0.001)


def follow(pool: GrammarPool, matcher: Matcher, most: int) -> list[bytes]:
    """Write a reply's first allowed tokens. Returns the mask of each."""
    masks: list[bytes] = []
    while True:
        settle(pool, matcher)
        if matcher.failure or matcher.stopped or len(masks) == most:
            return masks
        masks.append(matcher.mask.tobytes())
        matcher.push(int(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little").argmax()))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"json_schema": {"type": "integer", "const": LEAST}}, "was ended by SIGSEGV"),
        ({"json_schema": {"type": "integer", "enum": [1, LEAST]}}, "was ended by SIGSEGV"),
        (
            {
                "lark_grammar": "start: a0\n"
                + "".join(f"a{i}: a{i + 1}\n" for i in range(10_000))
                + 'a10000: "x"'
            },
            "was ended by SIGSEGV",
        ),
        (SLOW, "more than (4 s of a processor's time|256 MiB of memory)|takes longer than 30 s"),
    ],
    ids=["least", "enum", "chain", "multiple"],
)
def test_what_ends_or_holds_a_compiler_is_refused_and_the_next_grammar_compiles(
    pool: GrammarPool, rule: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        compiled(pool, rule)
    matcher = begun(pool, {"regex": "ab"})
    assert len(follow(pool, matcher, 9)) == 2 or matcher.stopped


def test_what_fills_the_memory_is_refused_with_the_limit(
    omni: Qwen3Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen3_omni_neuron.helpers.grammars.child.MEMORY_BYTES", 48 << 20)
    monkeypatch.setattr(pool_module, "MEMORY_BYTES", 48 << 20)
    text = omni._config.thinker.text
    own = GrammarPool(
        omni.prompt_builder.tokenizer_json, text.vocab_size, omni._config.im_end_id, 1
    )
    lark = "start: A\nA: " + '"x"? ' * 20_000
    with pytest.raises(OptionError, match="more than 48 MiB of memory"):
        compiled(own, {"lark_grammar": lark})
    own.close()
    with pytest.raises(ClosedError):
        compiled(own, {"regex": "a"})


def test_a_grammar_that_nobody_waits_for_any_more_ends_its_process(pool: GrammarPool) -> None:
    compiled(pool, {"regex": "a"})
    compiling = pool.compile(rules_of(SLOW), lambda made: made, "one")
    wait_for(lambda: "one" in pool._alone._owners)
    compiling.cancel()
    wait_for(lambda: "one" not in pool._alone._owners)  # which its process gives back as it ends


def test_one_owner_slow_grammars_keep_no_other_owner_from_compiling(pool: GrammarPool) -> None:
    compiled(pool, {"regex": "a"})
    slow = [pool.compile(rules_of(SLOW), lambda made: made, "a") for _ in range(6)]
    other = compiled(pool, {"regex": "[ab]{3}"}, owner="b")
    assert not any(one.done() for one in slow)
    large = [{"type": "string", "pattern": f"^[a-z]{{{n},{n + 90}}}$"} for n in range(60)]
    compiled(pool, {"json_schema": {"anyOf": large}}, owner="b")
    for one in slow:
        one.cancel()
    other.close()


def test_the_bytes_of_a_grammar_are_admitted_or_it_is_refused(pool: GrammarPool) -> None:
    held: list[int] = []
    compiled(pool, {"regex": "a"}, admit=held.append)
    assert len(held) == 1 and held[0] >= 0

    def refuse(size: int) -> None:
        raise MemoryError(f"{size} bytes")

    with pytest.raises(MemoryError, match="bytes"):
        compiled(pool, {"regex": "a"}, admit=refuse)


@pytest.mark.usefixtures("patient")
def test_a_grammar_that_was_tried_is_kept_for_its_owner_alone(pool: GrammarPool) -> None:
    rule = {"regex": "kept[xy]{9}"}
    first = begun(pool, rule)
    expected = follow(pool, first, 9)
    first.close()
    again, other = compiled(pool, rule), compiled(pool, rule, owner="other")
    assert again.number == first.grammar.number != other.number
    assert follow(pool, begun(pool, rule), 9) == expected
    with pytest.raises(MemoryError):
        compiled(pool, rule, admit=Mock(side_effect=MemoryError))
    again.close()
    other.close()


def try_others(pool: GrammarPool, word: str) -> None:
    """Try a new grammar in every spare child, which forgets those that it tried before."""
    for number in range(pool_module.TRIES):
        compiled(pool, {"regex": f"{word}{number}[xy]{{9}}"}).close()


@pytest.mark.usefixtures("patient")
def test_the_child_of_the_try_makes_the_first_mask_and_the_shared_one_the_others(
    pool: GrammarPool,
) -> None:
    rule = {"regex": "first[xy]{9}"}
    new = begun(pool, rule)
    tried = new.child
    assert tried is not None and tried is not pool._shared
    masks = follow(pool, new, 1)
    assert new.child is pool._shared and not tried.users
    known = begun(pool, rule)
    assert known.child is pool._shared
    assert masks + follow(pool, new, 8) == follow(pool, known, 9)
    try_others(pool, "second")
    assert new.grammar.number not in tried.grammars


@pytest.mark.usefixtures("patient")
def test_a_grammar_whose_try_was_forgotten_begins_in_the_shared_child(pool: GrammarPool) -> None:
    first = compiled(pool, {"regex": "waits[xy]{9}"})
    try_others(pool, "comes after it")
    matcher = first.matcher(np.zeros(pool.words, np.uint32))
    BEGUN.append(matcher)
    matcher.begin([])
    assert matcher.child is pool._shared
    assert len(follow(pool, matcher, 9)) == 9


@pytest.mark.usefixtures("patient")
def test_the_longest_unused_grammar_is_forgotten_when_its_replies_end(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "KEPT", 2)
    made = [compiled(pool, {"regex": f"unused{n}[xy]{{9}}"}) for n in range(3)]
    assert pool._shared is not None
    known = pool._shared.grammars
    assert {grammar.number for grammar in made} <= known
    for grammar in made:
        grammar.close()
    assert {g.number for g in made} & known == {g.number for g in made[1:]}
    monkeypatch.setattr(kept_module, "KEPT_BYTES", 0)
    compiled(pool, {"regex": "unused[xy]{9}"}).close()
    assert not known


def test_a_reply_that_ends_while_it_waits_for_a_place_gets_none(pool: GrammarPool) -> None:
    matcher = begun(pool, {"regex": "[a-z]*"})
    settle(pool, matcher)
    child = matcher.child
    assert child is not None
    with pool.lock:
        matcher.leave()  # as where its process has died
    matcher.close()
    free = len(child.free)
    pool._replay([matcher])
    assert matcher.child is None and len(child.free) == free


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("what", ["the process", "its fork server"])
def test_replies_go_on_from_their_tokens_after_a_death(pool: GrammarPool, what: str) -> None:
    """With the masks that they would have had: nobody's grammar was at fault."""
    rules = [{"regex": "(hello|help) [0-9]{4}!"}, {"json_schema": {"enum": ["abc", "abd"]}}]
    whole = [follow(pool, begun(pool, rule), 4) for rule in rules]
    matchers = [begun(pool, rule) for rule in rules]
    parts = [follow(pool, matcher, 2) for matcher in matchers]
    settle(pool, *matchers)
    child = matchers[0].child
    assert child is not None and child.pid is not None and pool._server is not None
    os.kill(child.pid if what == "the process" else pool._server.pid, signal.SIGKILL)
    wait_for(lambda: child.broken and all(one.child is not child for one in matchers))
    for matcher, part, expected in zip(matchers, parts, whole, strict=True):
        assert part + follow(pool, matcher, 2) == expected and matcher.failure is None


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("busy", "masks took more than 250 ms of a processor's time"),
        ("zero", "doesn't satisfy the grammar"),
    ],
)
def test_a_fault_fails_its_own_reply_and_another_goes_on(
    faulty: GrammarPool, fault: str, message: str
) -> None:
    rule = {"regex": "[xy]{9}"}
    expected = follow(faulty, begun(faulty, rule), 9)
    other, culprit = begun(faulty, rule), begun(faulty, {"regex": f"{fault}[a-z]{{9}}"})
    masks = follow(faulty, other, 1)
    follow(faulty, culprit, 1)
    assert other.child is culprit.child or other.child is None
    follow(faulty, culprit, 8)
    assert culprit.failure is not None and message in culprit.failure
    again = compiled(faulty, {"regex": f"{fault}[a-z]{{9}}"})
    assert (again.number == culprit.grammar.number) == (fault == "zero")
    again.close()
    assert masks + follow(faulty, other, 8) == expected and other.failure is None


@pytest.mark.skipif(sys.platform != "linux", reason="files can be sealed on Linux alone")
def test_the_memory_of_masks_can_not_be_cut_short(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()

    def noted() -> BinaryIO:
        file = nameless_file()
        made.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(child_module, "nameless_file", noted)
    matcher = begun(pool, {"regex": "[xy]{9}"})
    follow(pool, matcher, 1)
    first = matcher.child
    assert first is not None and first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: matcher.child not in (None, first))
    sizes = {descriptor: os.fstat(descriptor).st_size for descriptor in made}
    assert first.rows.nbytes in sizes.values()
    for descriptor, size in sizes.items():
        if size == first.rows.nbytes:
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
        os.close(descriptor)
    assert len(follow(pool, matcher, 8)) == 8


@pytest.mark.repeats
def test_a_process_that_does_nothing_is_replaced(
    faulty: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STUCK_S", 0.2)
    matcher = begun(faulty, {"regex": "stop[a-z]{9}"})
    follow(faulty, matcher, 9)
    assert matcher.failure is not None and "SIGKILL" in matcher.failure


def test_a_wait_for_masks_ends_in_time_and_says_who_was_late(faulty: GrammarPool) -> None:
    matcher = begun(faulty, {"regex": "busy[a-z]{9}"})
    follow(faulty, matcher, 1)
    matcher.push(int(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little").argmax()))
    faulty.wait([matcher], 0.0)
    assert not matcher.late  # it was no step's wait
    faulty.wait([matcher], 0.005)
    assert matcher.late and matcher.pending


def wait_for(done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.005)


OPTIONS: list[dict[str, Any]] = [
    {"grammar": {"regex": "(red|blue) [0-9]{3}\\."}},
    {"grammar": {"regex": "[ab ]{40}"}, "stop": ["b a"]},
    {"grammar": {"json": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 4}}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["regex", "stop", "json"])
def test_a_reply_that_sits_out_steps_is_the_same(
    omni: Qwen3Omni, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
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


def test_a_grammar_that_ends_at_the_limit_of_tokens_ends_by_itself(omni: Qwen3Omni) -> None:
    grammar = {"regex": "[0-9]{3}!"}
    count = len(omni.generate_text(HELLO, seed=3, grammar=grammar).token_ids)
    for most, reason in ((count, "stop"), (count - 1, "length")):
        result = omni.generate_text(HELLO, seed=3, grammar=grammar, thinker_max_new_tokens=most)
        assert (result.thinker_finish_reason, len(result.token_ids)) == (reason, most)


def test_the_tokens_that_end_a_reply_are_read_once(omni: Qwen3Omni) -> None:
    """However many they are: a step reads none of them."""
    read = []

    class Counted(frozenset[int]):
        def __iter__(self) -> Iterator[int]:
            read.append(threading.current_thread().name)
            return super().__iter__()

    compiling = omni.compile_grammar(grammar={"regex": "[ab]{9}"})
    assert compiling is not None
    grammar = compiling.result(LONG_S)
    assert isinstance(grammar, Grammar)
    state = grammar.begin(Counted((omni._config.im_end_id, *range(10**6, 10**6 + 9))))
    for _ in range(4):
        settle(omni._grammars._pool, state._matcher)
        bits = np.unpackbits(state._matcher.mask.view(np.uint8), bitorder="little")
        state.push(int(bits.argmax()))
    state.close()
    assert len(read) == 1
