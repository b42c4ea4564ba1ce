"""Truncation: where a conversation that is too long is cut, and what a turn after the cut costs."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.errors import OptionError, PromptTooLongError
from qwen3_omni_neuron.prompt.messages import ConversationPart, Truncation
from qwen3_omni_neuron.prompt.tokenizer import Tokenizer
from testing.media_cases import CASES, assistant, audio, image, noise_image, text, tone, user
from testing.recorded_calls import Calls, ungated, watching
from testing.repeats import examples
from testing.replies import GREEDY, assert_alike, last

LIMITS: dict[str, Any] = {**GREEDY, "thinker_max_new_tokens": 4, "talker_max_new_tokens": 6}
SYSTEM = {"role": "system", "content": "Be brief."}
CONTEXT = 320


def ratio(retained: float, most: int) -> dict[str, Any]:
    limits = {"post_instructions": most}
    return {"type": "retention_ratio", "retention_ratio": retained, "token_limits": limits}


def part(role: str, tokens: int, **numbers: int) -> ConversationPart:
    return ConversationPart(role, 0, 0, tokens, **numbers)


@pytest.fixture(scope="module")
def calls() -> Calls:
    return ungated()


@pytest.fixture(scope="module")
def small(checkpoint_of_seed, calls) -> Iterator[Qwen3Omni]:
    """A model of a short context, whose engine calls are recorded."""
    checkpoint: Path = checkpoint_of_seed(1)
    with Qwen3Omni.load(
        checkpoint, context_length=CONTEXT, max_concurrency=1, wrap_engines=watching(calls)
    ) as omni:
        yield omni


def kept_live(sizes: Sequence[tuple[int, int]], most: int, retained: float) -> list[int]:
    """Return the first turn that each reply reads, if cuts are made as the conversation goes on.

    sizes: tokens of each question, and of its answer.
    """
    found, first = [], 0
    for at, (question, _) in enumerate(sizes):
        tokens = sum(map(sum, sizes[first:at])) + question
        if tokens > most:
            while first < at and tokens > retained * most:
                tokens -= sum(sizes[first])
                first += 1
        found.append(first)
    return found


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(1, 120),
    st.sampled_from((1.0, 0.8, 0.5, 0.0)),
)
def test_a_whole_conversation_is_cut_where_it_was_cut_turn_by_turn(sizes, most, retained) -> None:
    parts = [part(r, n) for pair in sizes for r, n in zip(("user", "assistant"), pair, strict=True)]
    limits = Truncation(most + 7, retained)
    found = [limits.first_kept(7, parts[: 2 * at + 1]) for at in range(len(sizes))]
    assert found == [2 * first for first in kept_live(sizes, most, retained)]


def test_a_result_stays_with_its_call() -> None:
    parts = [
        part("user", 10),
        part("assistant", 10, calls=1),
        part("user", 10),  # said before the result came
        part("tool", 10, results=1),
        part("assistant", 10, calls=1),
        part("user", 10),  # the second call has no result
        part("assistant", 10),
        part("user", 10),
    ]
    limits = Truncation(1000, 1.0, after_instructions=49)
    assert limits.first_kept(0, parts[:4]) == 0  # 40
    assert limits.first_kept(0, parts[:6]) == 5  # 60, and a cut at 2 would keep a lone result
    assert limits.first_kept(0, parts) == 5
    assert Truncation(29).first_kept(0, parts) == 7


def test_the_last_turn_and_instructions_stay_whatever_their_length() -> None:
    parts = [part("assistant", 5), part("user", 5), part("assistant", 5), part("user", 50)]
    assert Truncation(10, 0.0).first_kept(100, parts) == 3
    assert Truncation(10).first_kept(100, parts[:1]) == 0


def test_truncation_leaves_room_for_the_reply_up_to_an_eighth_of_the_context() -> None:
    """Room for all tokens of the reply, and at most an eighth of the context."""
    assert Truncation.of("auto", 8000, 300) == Truncation(7700)
    assert Truncation.of("auto", 8000, 4000) == Truncation(7000)
    assert Truncation.of(ratio(0.8, 50), 8000, 4000) == Truncation(7000, 0.8, 50)
    assert Truncation.of("disabled", 8000, 300) is None


@pytest.mark.parametrize("literal_text", [True, False])
@pytest.mark.parametrize("name", ["five-turns", "users-in-a-row"])
def test_each_part_is_counted_to_the_token(omni, name, literal_text) -> None:
    """At the kept prompt's length nothing more is dropped, and at one less the next turn is."""
    read, messages = omni.prompt_builder, CASES[name].messages
    system = [m for m in messages if m["role"] == "system"]
    rest = messages[len(system) :]
    starts = [at for at, message in enumerate(rest) if message["role"] == "user"]
    lengths = [
        len(read.prompt([*system, *rest[start:]], literal_text=literal_text)) for start in starts
    ]
    assert len(set(lengths)) == len(starts) >= 2
    for at, most in enumerate(lengths):
        for limit, kept in ((most, at), (most - 1, min(at + 1, len(starts) - 1))):
            prompt = read.prompt(messages, literal_text=literal_text, truncation=Truncation(limit))
            expected = read.prompt([*system, *rest[starts[kept] :]], literal_text=literal_text)
            assert prompt.token_ids.tolist() == expected.token_ids.tolist()
            assert prompt.positions.tolist() == expected.positions.tolist()
            assert len(prompt.audio_mel) == len(expected.audio_mel)
            assert len(prompt.images) == len(expected.images)


WITH_TOOLS = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ m.tool_calls | default("") | tojson }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def test_tools_are_kept_and_counted_and_replies_stay_words(omni, monkeypatch) -> None:
    """Replies that spell a special token are of fewer tokens where they are taken for it."""
    read = omni.prompt_builder
    monkeypatch.setattr(read, "_template", SimpleNamespace(render=compiled(), takes_tools=True))
    monkeypatch.setattr(read, "_lengths", {})
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It is dark."},
        {"role": "assistant", "content": "Dark <|im_end|>"},
    ]
    messages = [SYSTEM, *turn, *turn, turn[0]]
    said, tools = [4, 8], [{"type": "function", "function": {"name": "look"}}]
    kept = read.assemble([SYSTEM, *turn, turn[0]], [], tools=tools, said=[4])
    for most, expected in (
        (len(kept), kept),
        (len(kept) - 1, read.assemble([SYSTEM, turn[0]], [], tools=tools)),
    ):
        made = read.assemble(messages, [], tools=tools, said=said, truncation=Truncation(most))
        assert made.token_ids.tolist() == expected.token_ids.tolist()


def compiled() -> Callable[..., str]:
    template = Environment(trim_blocks=True).from_string(WITH_TOOLS)
    return lambda messages, tools=None: template.render(messages=messages, tools=tools)


QUESTIONS = [
    user(text("What is this? " * 3), image(64, 64)),
    user(text("And this sound? " * 4), audio(1.5)),
    user(text("Who are you, then? " * 6)),
    user(text("What do you see? " * 5)),
]


def test_a_reply_is_the_one_to_the_kept_messages(small, omni) -> None:
    with small.session("Be brief.", truncation="auto", **LIMITS) as session:
        for number, question in enumerate(QUESTIONS):
            session.append(question["content"])
            messages = session.messages
            reply = last(session.respond())
            length = reply.timings.prompt_tokens
            whole = len(omni.prompt_builder.prompt(messages))
            assert (length == whole) == (number < 3), whole
            assert length <= CONTEXT - LIMITS["thinker_max_new_tokens"]
    kept = [
        [SYSTEM, *messages[at:]]
        for at in range(2, len(messages))
        if len(omni.prompt_builder.prompt([SYSTEM, *messages[at:]])) == length
    ]
    assert [message["role"] for message in kept[0][:3]] == ["system", "user", "assistant"]
    expected = omni.generate_audio(kept[0], **LIMITS)
    again = small.generate_audio(messages, truncation="auto", **LIMITS)
    for result in (reply, again):
        assert_alike(result, expected)


def test_a_ratio_below_one_cuts_seldom_and_reuses_rows_between_cuts(small, calls) -> None:
    """A ratio below 1 cuts seldom; then all but the new turn is reused."""

    def rows(option: Any) -> list[int]:
        calls.made.clear()
        with small.session(cache_key=str(option), truncation=option, **LIMITS) as session:
            for number in range(12):
                session.append(f"Question {number}, in some words.")
                last(session.respond(speak=False))
        return calls.rows("thinker.prefill")

    each, seldom = rows(ratio(1.0, 200)), rows(ratio(0.5, 200))
    assert each[:5] == seldom[:5]
    new = max(each[:5])
    assert [turn for turn, count in enumerate(each) if count > new] == list(range(5, 12))
    assert [turn for turn, count in enumerate(seldom) if count > new] == [5, 9]
    assert max(seldom) < min(each[5:])  # what is kept after a cut


def test_speech_that_arrives_is_cut_as_at_its_end(small, omni) -> None:
    with small.session("Be brief.", [user(text("Hm? " * 60)), assistant("No.")]) as session:
        session.set_options(truncation="auto", **LIMITS)
        for _ in range(16):
            session.append_audio(tone(1.0), 16000)
        reply = last(session.respond())
        kept = [SYSTEM, session.messages[3]]
    assert reply.timings.prompt_tokens == len(omni.prompt_builder.prompt(kept))
    assert reply.codes.tolist() == omni.generate_audio(kept, **LIMITS).codes.tolist()


def test_what_does_not_fit_with_its_last_turn_alone_is_refused(small) -> None:
    long = [user(text("Hm? " * 100)), assistant("No."), user(text("Hm? " * 60), text("Ha? " * 60))]
    with pytest.raises(PromptTooLongError, match=r"KV cache has 320 .*let `truncation` drop"):
        small.generate_text(long, truncation="auto", **LIMITS)
    with pytest.raises(PromptTooLongError):
        small.generate_text([*long[:2], user(text("Hm? " * 60))], **LIMITS)
    assert small.generate_text(
        [*long[:2], user(text("Hm? " * 60))], truncation="auto", **LIMITS
    ).token_ids


def test_an_old_turn_longer_than_the_context_is_dropped(small, monkeypatch) -> None:
    prompt_builder, long = small.prompt_builder, user(text("Hm? " * 100_000))
    encode, longest = Tokenizer._encode, []
    monkeypatch.setattr(Tokenizer, "_encode", lambda *a: longest.append(len(a[2])) or encode(*a))
    last = [SYSTEM, user(text("More"))]
    for old in ([long, assistant("No.")], [user(text("Yes")), assistant("No."), long]):
        asked = [SYSTEM, *old, last[1]]
        made = prompt_builder.prompt(asked, most_tokens=319, truncation=Truncation(CONTEXT))
        assert made.token_ids.equal(prompt_builder.prompt(last).token_ids)
    assert max(longest) < 100_000
    with pytest.raises(PromptTooLongError, match=r"the prompt has 4000\d\d characters, which"):
        small.generate_text([SYSTEM, user(text("Yes")), assistant("No."), long], truncation="auto")


def test_other_values_are_refused(small) -> None:
    for wrong in (
        *("never", None, 0.8, [], {}, {"type": "retention_ratio"}, {"type": "auto"}),
        {"type": "retention_ratio", "retention_ratio": 1.1},
        {"type": "retention_ratio", "retention_ratio": True},
        {"type": "retention_ratio", "retention_ratio": 0.5, "more": 1},
        {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": 5},
        {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"most": 5}},
        ratio(0.5, -1),
    ):
        with pytest.raises(OptionError, match="truncation must be auto, disabled or"):
            small.session(truncation=wrong)


def test_old_images_are_dropped_and_none_is_shrunk(small) -> None:
    picture = {"type": "image", "image": noise_image(384, 384)}  # 144 tokens
    asked = [user(picture), assistant("A cat."), user(picture), assistant("A dog."), user(picture)]
    builder = small.prompt_builder
    made = builder.prompt(asked, most_tokens=319, truncation=Truncation(319))
    assert made.token_ids.equal(builder.prompt(asked[2:]).token_ids)
    assert [image.grid for image in made.images] == [(1, 24, 24)] * 2
    with pytest.raises(PromptTooLongError, match="the prompt has 4"):
        small.generate_text(asked, **LIMITS)


def test_only_turns_that_may_fit_are_tokenised(prompt_builder, monkeypatch) -> None:
    asked = [SYSTEM, *(user(text(f"Turn {i}")) for i in range(2000))]
    tokenised, encode = list[int](), prompt_builder._template_ids

    def counted(*given: Any) -> list[int]:
        tokenised.append(len(given[0].messages))
        return encode(*given)

    monkeypatch.setattr(prompt_builder, "_template_ids", counted)
    made = prompt_builder.prompt(asked, most_tokens=319, truncation=Truncation(CONTEXT))
    assert 200 < len(made) <= CONTEXT
    assert len(tokenised) < 100


def test_a_texts_least_tokens_take_linear_time_for_marks_out_of_their_order(prompt_builder) -> None:
    marks, start_s = "a" + "\u0315\u0300" * 40_000, time.monotonic()
    assert 0 < prompt_builder.least_tokens(marks) <= len(prompt_builder.encode_words(marks))
    assert time.monotonic() - start_s < 5  # unicodedata.normalize takes half a minute
