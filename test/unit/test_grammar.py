"""Grammars: what they let a reply write, what they refuse, and that they disturb nobody else."""

import json
import re
import select
import socket
import sys
from functools import partial
from typing import Any

import pytest

from qwen3_omni_neuron import Finished, TextDelta
from qwen3_omni_neuron.errors import GrammarError, NotInstalledError, OptionError
from qwen3_omni_neuron.runtime import grammar as grammar_module

pytest.importorskip("llguidance", reason="the extra serve is not installed")
HELLO = [{"role": "user", "content": "Hello"}]
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 120, "talker_max_new_tokens": 20}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["K\u00f6ln", "\u6771\u4eac"]},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
        "warm": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days", "warm"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_a_reply_is_json_of_its_schema_with_its_letters_as_they_are(omni, seed) -> None:
    options = {"thinker_do_sample": True, "thinker_temperature": 2.0, "thinker_top_k": 0, **LIMITS}
    for grammar in ({"json": SCHEMA}, {"json": SCHEMA, "strict": True}):
        result = omni.generate_text(HELLO, seed=seed, grammar=grammar, **options)
        found = json.loads(result.text)
        assert list(found) == ["city", "days", "warm"]
        assert found["city"] in ("K\u00f6ln", "\u6771\u4eac") and len(found["days"]) <= 3
        assert result.text == json.dumps(found, ensure_ascii=False)
        assert result.thinker_finish_reason == "stop"


def test_a_regex_and_a_lark_grammar_hold_text_and_speech(omni) -> None:
    for grammar, pattern in (
        ({"regex": "(red|blue) [0-9]{3}\\."}, r"(red|blue) [0-9]{3}\."),
        ({"lark": 'start: a "!"\na: "ho" | "hi" a'}, r"(hi)*ho!"),
        ({"lark": 'root ::= ("no " | "yes ") num\nnum ::= [0-9]{2}'}, "(no|yes) [0-9]{2}"),
        ({"lark": 'start: "<|im_end|>\\"" /<[3]>/ # <think>'}, r'<\|im_end\|>"<3>'),
    ):
        result = omni.generate_audio(HELLO, seed=1, grammar=grammar, **LIMITS)
        assert re.fullmatch(pattern, result.text) and len(result.audio)


VALUES = [
    *("a<|im_end|>b", "<think>", "<|endoftext|>", "</tool_call>", "\u00ff<|im_end|>", "<[3]>"),
    *(
        "cafe\u0301",
        "a\u0327\u0301",
        "\u1112\u1161\u11ab",
        "\u212b",
        "\U0001f600\U0002f81a",
        "\ufeff",
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_forced_text_is_written_as_its_bytes(omni, value) -> None:
    """Names of special tokens, text that is not NFC and astral text: keys, enums, references."""
    keys = {value: {"enum": [value]}, "again": {"$ref": "#/$defs/again"}}
    schema = {
        "type": "object",
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
        "$defs": {"again": {"const": value}},
    }
    result = omni.generate_text(HELLO, grammar={"json": schema}, thinker_max_new_tokens=200)
    assert result.text == json.dumps(dict.fromkeys(keys, value), ensure_ascii=False)
    names = {*omni.prompt_builder.added_tokens}
    assert names.isdisjoint(omni.prompt_builder._tokenizer.token(i) for i in result.token_ids)


ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3}, "price": {"type": "number"}},
    "required": ["name", "price"],
    "additionalProperties": False,
}
# Grammars whose replies have no end of their own, and the pattern of the whole ones; None: JSON.
ENDLESS: list[tuple[dict[str, Any], str | None]] = [
    ({"json": {"type": "object"}}, None),
    ({"json": {"type": "array", "items": ITEM, "minItems": 1}}, None),
    ({"json": {"type": "array", "items": {"format": "date", "type": "string"}}}, None),
    ({"regex": "[a-z]+( [a-z]+)*\\."}, r"[a-z ]+\."),
    ({"lark": 'start: e\ne: /[0-9]+/ | "(" e "+" e ")"'}, r"[0-9]+|\(.*\)"),
    ({"lark": 'start: "x" ("yx")* /[a-z]*/'}, r"x(yx)*[a-z]*"),
]


@pytest.mark.parametrize(("grammar", "pattern"), ENDLESS, ids=[str(g) for g, _ in ENDLESS])
def test_a_limit_closes_what_is_open(omni, grammar, pattern) -> None:
    """By the shortest completion, for which a few tokens before the limit are enough."""
    for seed, limit in enumerate((45, 60, 100, 300)):
        free = {"thinker_do_sample": True, "thinker_temperature": 5.0, "thinker_top_k": 0}
        options = {"seed": seed, "thinker_max_new_tokens": limit, **free}
        result = omni.generate_text(HELLO, grammar=grammar, **options)
        written = len(result.token_ids) if result.thinker_finish_reason == "length" else limit
        assert limit - 40 < written <= limit
        assert json.loads(result.text) is not None if pattern is None else True
        assert pattern is None or re.fullmatch(pattern, result.text)


def test_requests_with_a_grammar_and_without_run_together_as_they_run_alone(omni) -> None:
    grammars: list[Any] = [{"json": SCHEMA}, None, {"regex": "[a-z]{20}"}]
    asked = [{"seed": 5 + n, "grammar": g, **LIMITS} for n, g in enumerate(grammars)]
    alone = [omni.generate_text(HELLO, **options).token_ids for options in asked]
    streams = [omni.stream_text(HELLO, **options) for options in asked]
    together = [list(stream)[-1] for stream in streams]
    assert [e.result.token_ids for e in together if isinstance(e, Finished)] == alone
    free = {name: value for name, value in asked[1].items() if name != "grammar"}
    assert omni.generate_text(HELLO, **free).token_ids == alone[1]


def test_masks_are_made_while_the_engine_computes(omni, monkeypatch) -> None:
    """Each call of the engine here lasts until the mask of its token lies in the other process."""
    states: list[grammar_module.GrammarState] = []
    engine, begin = omni._pipeline._engines.thinker, grammar_module.Grammar.begin

    def begun(grammar: Any, *limits: Any) -> Any:
        states.append(begin(grammar, *limits))
        return states[-1]

    def slow(call: Any, *arguments: Any) -> Any:
        grammar = states[0]._matcher
        if grammar.pending:
            select.select([grammar], [], [], 60)
            peeked = grammar._child.socket.recv(1, socket.MSG_PEEK)
            assert peeked, "the mask waits for the engine"
        return call(*arguments)

    monkeypatch.setattr(grammar_module.Grammar, "begin", begun)
    for name in ("prefill", "step"):
        monkeypatch.setattr(engine, name, partial(slow, getattr(engine, name)))
    result = omni.generate_text(HELLO, grammar={"regex": "[ab]{9}"}, **LIMITS)
    assert re.fullmatch("[ab]{9}", result.text)


def test_a_grammar_that_grows_too_complex_ends_its_own_reply_alone(omni) -> None:
    lark = "start: a a a a a\na: a a | /[a-z]/ | b\nb: a b| /[a-z]/ | "
    other = omni.stream_text(HELLO, seed=3, **LIMITS)
    with pytest.raises(GrammarError, match=r"can't continue within its grammar: .*Simplify"):
        omni.generate_text(HELLO, seed=2, grammar={"lark": lark}, thinker_temperature=5.0, **LIMITS)
    assert isinstance(list(other)[-1], Finished)
    assert omni.status().fault is None


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(count)}}


def strict(**changes: Any) -> dict[str, Any]:
    return {"json": SCHEMA | changes, "strict": True}


NESTED: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
for _ in range(11):
    NESTED = {
        "type": "object",
        "properties": {"a": NESTED},
        "required": ["a"],
        "additionalProperties": False,
    }
REFUSED: list[tuple[Any, str]] = [
    ({"xml": ""}, "grammar must be"),
    ({"json": SCHEMA, "regex": "a"}, "grammar must be"),
    ({"regex": 3}, "grammar must be"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a" * (1 << 19)}, "524288 characters"),
    ({"lark": "start: nothing"}, "unknown name"),
    ({"lark": 'root ::= "a" | ('}, "can't be used"),
    ({"lark": 'start: "a" <|im_end|> "b"'}, r"special token <\|im_end\|>, .* in quotes"),
    ({"lark": 'start: /["#]/ <[151645]>'}, "special token <.151645.>"),
    ({"json": {"type": "text"}}, "Invalid type: text"),
    ({"json": {"not": {}}}, 'Unimplemented keys: \\["not"\\]'),
    ({"json": {"$ref": "http://localhost/a"}}, "not present in a registry"),
    ({"json": deep(80)}, "nested deeper than 64"),
    ({"json": properties(501)}, "501 properties that are not required, more than the limit of 500"),
    ({"json": {"enum": ["a" * (1 << 18)]}}, "262158 characters, more than the limit of 262144"),
    ({"json": {"const": float("nan"), "description": {1, 2}}}, "can't be written as JSON"),
    ({"json": {"format": "date", "enum": ["2021-02-29"]}}, "Unsatisfiable schema"),
    ({"json": {"format": "time", "enum": ["23:58:60Z"]}}, "Unsatisfiable schema"),
    ({"json": {"const": "a\ud800"}}, "character '.ud800' .*surrogates not allowed"),
    ({"regex": "a\udfff"}, "character '.udfff' .*surrogates not allowed"),
    (strict(additionalProperties=True), "every object in it needs additionalProperties: false"),
    (strict(required=["city"]), "required must name every property, and lacks 'days'"),
    (strict(allOf=[]), "allOf is not supported in strict schemas"),
    (strict(type="array"), "its root must be of type object"),
    (strict(**{"$defs": {"x": {"enum": list(range(1001))}}}), "1003 values of enums"),
    (strict(**{"$defs": {"x": {"const": "a" * 120_000}}}), "1200.. characters in its names"),
    ({"json": NESTED, "strict": True}, "nested deeper than 10 levels"),
]


@pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_can_not_be_used_is_refused_before_the_reply(omni, grammar, message) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        omni.stream(HELLO, grammar=grammar)
    assert len(str(refused.value)) < 1000
    assert not omni.status().running


def test_reasoning_comes_before_the_grammar(omni, monkeypatch) -> None:
    """Whatever it says; then blank lines may come, and the grammar."""
    monkeypatch.setitem(omni.prompt_builder.__dict__, "thinks", True)
    begun = omni.prompt_builder._tokenizer.encode("Maybe <tool_call> no.</think>\n")
    stage = omni._pipeline._thinker
    sample = stage._sample_ids
    monkeypatch.setattr(
        stage, "_sample_ids", lambda *a: [begun.pop(0) if begun else i for i in sample(*a)]
    )
    result = omni.generate_text(HELLO, grammar={"regex": "(yes|no)!"}, **LIMITS)
    assert re.fullmatch(r"Maybe <tool_call> no\.</think>\n{1,2}(yes|no)!", result.text)


def test_a_grammar_that_was_compiled_before_its_request_gives_the_same_reply(omni) -> None:
    compiling = omni.compile_grammar(grammar={"json": SCHEMA})
    assert compiling is not None and omni.compile_grammar() is None
    replies = [
        omni.generate_text(HELLO, seed=4, grammar=grammar, **LIMITS)
        for grammar in (compiling.result(60), {"json": SCHEMA})
    ]
    assert replies[0].token_ids == replies[1].token_ids


def test_without_llguidance_the_error_says_how_to_install_it(omni, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # an import of None raises ImportError
    with pytest.raises(NotInstalledError, match=r"pip install .qwen3-omni-neuron\[serve\]"):
        omni.stream(HELLO, grammar={"regex": "a"})
    (event, *_) = omni.stream_text(HELLO, seed=3, **LIMITS)
    assert isinstance(event, TextDelta)
