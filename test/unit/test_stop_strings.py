"""Strings that end a reply: found wherever they begin, and no part of one is passed on."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron import TextDelta
from qwen3_omni_neuron.prompt.tokenizer import Tokenizer
from qwen3_omni_neuron.runtime.stop_strings import CallWatch, StopStrings
from testing.marked_text import strings_with_markers
from testing.repeats import examples
from testing.replies import assert_alike

HELLO = [{"role": "user", "content": "Hello"}]
LIMITS: dict[str, Any] = {"seed": 3, "thinker_max_new_tokens": 24, "talker_max_new_tokens": 40}


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint)


def run(tokenizer: Tokenizer, token_ids: list[int], stops: list[str]) -> tuple[str, bool, int]:
    """Returns the text that is passed on, whether a stop string ended it, and the tokens read."""
    watch = StopStrings(stops, tokenizer.decode, tokenizer.encode_words)
    passed: list[int] = []
    for count, token_id in enumerate(token_ids, start=1):
        more, stopped = watch.push(token_id)
        passed += more
        if stopped:
            return tokenizer.decode(passed), True, count
        assert watch.buffered <= 4 * max(map(len, stops)) + 4
    return tokenizer.decode(passed + watch.flush()), False, len(token_ids)


TEXTS = st.text(st.sampled_from("ab .\n\u00e9\u4f60"), max_size=24)
WORDS = st.sampled_from([" the", " one", " red", " hello", "<|im_end|>"])


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.one_of(TEXTS, WORDS), max_size=6).map("".join),
    st.lists(st.text(st.sampled_from("ab .e\u4f60o"), min_size=1, max_size=4), min_size=1),
)
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stops) -> None:
    token_ids = tokenizer.encode_words(text)
    whole = tokenizer.decode(token_ids)
    cuts = [at for at in map(whole.find, stops) if at >= 0]
    got, stopped, _ = run(tokenizer, token_ids, stops)
    assert stopped == bool(cuts)
    # Of two stop strings the one that is complete first ends the text.
    assert whole.startswith(got)
    assert not any(stop in got for stop in stops)
    if cuts:
        assert any(whole[len(got) :].startswith(stop) for stop in stops)
    else:
        assert got == whole


@settings(max_examples=examples(60), deadline=None)
@given(strings_with_markers)
def test_a_call_is_passed_on_whole_whatever_its_strings_say(tokenizer, text) -> None:
    body = json.dumps({"name": "f", "arguments": {"a": text}}, ensure_ascii=False)
    token_ids = tokenizer.encode_exactly(f"One.<tool_call>\n{body}\n</tool_call>\nTwo.")
    watch = CallWatch(tokenizer.decode, tokenizer.encode_exactly, reasoning=False)
    passed = [watch.push([token_id], last=False, by_model=False)[0] for token_id in token_ids]
    assert [i for ids in passed for i in ids] == token_ids
    assert watch.push([], last=True, by_model=True) == ([], [])
    (call,) = [ids for ids in passed if len(ids) > len("<tool_call></tool_call>") // 2]
    assert tokenizer.decode(call).strip().endswith(f"{body}\n</tool_call>")


def test_tokens_are_held_only_while_they_may_begin_a_stop_string(tokenizer) -> None:
    watch = StopStrings(["abc"], tokenizer.decode, tokenizer.encode_words)
    a, b, x = (tokenizer.encode_words(letter)[0] for letter in "abx")
    assert watch.push(a) == ([], False)
    assert watch.push(b) == ([], False)
    assert watch.push(x) == ([a, b, x], False)


def test_an_incomplete_character_is_no_replacement_character(tokenizer) -> None:
    """Nor does a stop string of one end a text at a character of several tokens."""
    emoji = tokenizer.encode_words("a\U0001f600b")
    assert len(emoji) > 3
    assert run(tokenizer, emoji, ["\ufffd", "a\ufffd"])[:2] == ("a\U0001f600b", False)
    assert run(tokenizer, tokenizer.encode_words("a\ufffdb"), ["\ufffd"])[:2] == ("a", True)


def test_a_reply_ends_before_the_stop_string_in_text_and_speech(omni) -> None:
    whole = omni.generate_audio(HELLO, **LIMITS)
    assert len(whole.text) > 8
    stop = whole.text[5:7]
    cut = whole.text[: whole.text.index(stop)]
    result = omni.generate_audio(HELLO, stop=[stop], **LIMITS)
    assert result.text == cut
    assert result.thinker_finish_reason == "stop"
    assert len(result.token_ids) < len(whole.token_ids)
    with omni.stream(HELLO, stop=[stop], **LIMITS) as stream:
        texts = [event.text for event in stream if isinstance(event, TextDelta)]
    assert "".join(texts) == cut


def test_a_stop_string_that_does_not_come_changes_nothing(omni) -> None:
    plain = omni.generate_audio(HELLO, **LIMITS)
    stops = ["\u4f60\u597d" * 3, plain.text[-1] + "never"]
    watched = omni.generate_audio(HELLO, stop=stops, **LIMITS)
    assert_alike(watched, plain)
    assert watched.thinker_finish_reason == plain.thinker_finish_reason
