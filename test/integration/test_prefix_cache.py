"""The prefix cache: what is computed is only what is new, and no reply changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.media_cases import audio, image, text, user, video
from testing.recorded_calls import Calls, WatchedThinker, ungated, watching
from testing.repeats import RUNS_ALL
from testing.replies import assert_alike

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "You are a brief and friendly assistant. Answer at once."}
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}


@pytest.fixture
def calls() -> Calls:
    return ungated()


@pytest.fixture
def caching(checkpoint, calls) -> Iterator[Qwen3Omni]:
    """A model of three slots whose engine calls are recorded."""
    with Qwen3Omni.load(checkpoint, max_concurrency=3, wrap_engines=watching(calls)) as omni:
        yield omni


@pytest.fixture(scope="module")
def anew(checkpoint_of_seed) -> Iterator[Qwen3Omni]:
    """A model that computes every prompt anew."""
    with Qwen3Omni.load(checkpoint_of_seed(1), max_concurrency=3, reuse=False) as omni:
        yield omni


def reply(result: SpeechResult) -> dict[str, Any]:
    return {"role": "assistant", "content": result.text}


def test_a_second_turn_computes_only_what_is_new(caching, anew, calls) -> None:
    messages: Messages = [SYSTEM, user(text("Look and listen."), image(64, 64), audio(9.0))]
    first = caching.generate_audio(messages, seed=1, **LIMITS)
    assert first.timings.reused_tokens == 0
    messages += [reply(first), user(text("And this?"), audio(1.0))]
    second = caching.generate_audio(messages, seed=2, **LIMITS)
    assert_alike(second, anew.generate_audio(messages, seed=2, **LIMITS))
    prompt, talker_rows = second.timings.prompt_tokens, calls.rows("talker.prepare")
    # The reply's text may be read as other tokens than it was written in.
    assert second.timings.reused_tokens >= first.timings.prompt_tokens - 3
    assert calls.rows("thinker.prefill")[1] == prompt - second.timings.reused_tokens
    assert talker_rows[1] < talker_rows[0]
    new = caching.prompt_builder.prompt([user(text("And this?"), audio(1.0))])
    assert talker_rows[1] == len(new.talker.token_ids)
    assert not calls.rows("thinker.copy")
    third = caching.generate_audio(messages, seed=2, **LIMITS)
    assert calls.rows("thinker.prefill")[2] == 1
    assert calls.rows("talker.prepare")[2] == 0
    assert_alike(second, third)


def test_a_system_prompt_is_computed_once_for_requests_at_the_same_time(
    caching, anew, calls
) -> None:
    """The second is admitted while the first is at its prompt; its rows are copied then."""
    questions = [[SYSTEM, user(text(words))] for words in ("Who are you?", "What time is it?")]
    calls.gate.clear()
    streams = [caching.stream(question, seed=3, **LIMITS) for question in questions]
    assert calls.entered.wait(30)
    calls.gate.set()
    results = [next(e.result for e in s if hasattr(e, "result")) for s in streams]
    copied = calls.rows("thinker.copy")
    ids = [caching.prompt_builder.prompt(question).token_ids for question in questions]
    shared = int((ids[0][: len(ids[1])] != ids[1][: len(ids[0])]).int().argmax())
    assert copied == [shared]
    assert shared > 10
    assert calls.rows("thinker.prefill") == [len(ids[0]), len(ids[1]) - shared]
    for question, result in zip(questions, results, strict=True):
        assert_alike(result, anew.generate_audio(question, seed=3, **LIMITS))


def test_after_a_cancel_within_a_prompt_its_rows_serve_the_next_request(
    caching, anew, calls
) -> None:
    question: Messages = [SYSTEM, user(text("Listen:"), audio(1.5), text("Well?"))]
    calls.gate.clear()
    stream = caching.stream(question, seed=1, **LIMITS)
    assert calls.entered.wait(30)
    stream.close()
    calls.gate.set()
    for end in ("Well?", "Why?"):
        question = [SYSTEM, user(text("Listen:"), audio(1.5), text(end))]
        result = caching.generate_audio(question, seed=1, **LIMITS)
        assert_alike(result, anew.generate_audio(question, seed=1, **LIMITS))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_prompt_that_fails_leaves_no_rows_in_the_cache(
    checkpoint, anew, monkeypatch, slots
) -> None:
    """Nor of what its slot held before in the places of its own rows."""
    calls = ungated()
    first: Messages = [SYSTEM, user(text("Who are you? " + "And who am I? " * 4))]
    other: Messages = [SYSTEM, user(text("Who are you? " + "What are we to do? " * 4))]
    prefill = WatchedThinker.prefill

    def fail(self: WatchedThinker, slot: int, prompt: Prompt, *rest: Any) -> Any:
        prefill(self, slot, prompt, *rest)
        raise RuntimeError("the engine failed after its work")

    with Qwen3Omni.load(checkpoint, max_concurrency=slots, wrap_engines=watching(calls)) as omni:
        omni.generate_audio(first, seed=1, **LIMITS)
        for _ in range(slots):
            monkeypatch.setattr(WatchedThinker, "prefill", fail)
            with pytest.raises(RuntimeError, match="after its work"):
                omni.generate_audio(other, seed=1, **LIMITS)
            monkeypatch.undo()
            for messages in (first, other):
                again = omni.generate_audio(messages, seed=1, **LIMITS)
                assert_alike(again, anew.generate_audio(messages, seed=1, **LIMITS))


CONTENTS = [
    lambda n: [text(f"Number {n}?")],
    lambda n: [audio(0.3 + 0.4 * n, 200.0 + n), text("Who was that?")],
    lambda n: [image(64, 64, n), text("What is it?")],
    lambda n: [video(4, 2.0, 1.5 if n % 2 else None), text("And that?")],
    lambda n: [audio(8.5, 300.0 + n)],
]


@dataclass(frozen=True)
class Turn:
    """One turn of one of four conversations.

    kept: how much of it stays, as a share of its messages. events: of a reply that is cancelled
    before the turn is answered, None for none.
    """

    conversation: int
    kept: float
    content: list[dict[str, Any]]
    events: int | None


TURNS = st.builds(
    Turn,
    st.integers(0, 3),
    st.one_of(st.just(1.0), st.just(1.0), st.floats(0, 1)),
    st.builds(lambda make, n: make(n), st.sampled_from(CONTENTS), st.integers(0, 2)),
    st.one_of(st.none(), st.none(), st.integers(0, 3)),
)


def test_any_conversations_are_the_same_with_and_without_the_cache(checkpoint, anew) -> None:
    """Four conversations over three slots that branch, are cancelled, and lose their slots.

    Sampled codes and tokens show that logits are the same to the bit.
    """
    cached, examples = 0, 12 if RUNS_ALL else 6

    @settings(max_examples=examples)
    @given(st.lists(TURNS, min_size=4, max_size=14))
    def answer(turns: list[Turn]) -> None:
        nonlocal cached
        conversations: list[Messages] = [[SYSTEM], [], [SYSTEM], []]
        with Qwen3Omni.load(checkpoint, max_concurrency=3) as omni:
            for number, turn in enumerate(turns):
                messages = conversations[turn.conversation]
                del messages[round(turn.kept * len(messages)) :]
                while messages and messages[-1]["role"] == "user":
                    messages.pop()
                messages.append(user(*turn.content))
                options = {"seed": number, "use_audio_in_video": True, **LIMITS}
                if turn.events is not None:
                    with omni.stream(messages, **options) as stream:
                        for _, _ in zip(stream, range(turn.events), strict=False):
                            pass
                result = omni.generate_audio(messages, **options)
                assert_alike(result, anew.generate_audio(messages, **options))
                cached += result.timings.reused_tokens
                messages.append(reply(result))

    answer()
    assert cached > 250 * examples
