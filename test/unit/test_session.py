"""Sessions: turns, barge-ins, what was heard, and what is refused."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.errors import (
    AudioError,
    BusyError,
    ClosedError,
    ImageError,
    LateError,
    MessageError,
    OptionError,
    PromptTooLongError,
)
from qwen3_omni_neuron.events import AudioChunk, Finished, SpeechResult, TextDelta, Timings
from qwen3_omni_neuron.prompt.turns import BYTES_PER_S, RATE_WEIGHT_S, Reply, mean_pace
from qwen3_omni_neuron.session import Session
from testing.http_server import wait_until
from testing.media_cases import IMAGE, text, tone, user
from testing.replies import GREEDY, last
from testing.sessions import assert_same_prompt, prompt_of

SHORT = {**GREEDY, "thinker_max_new_tokens": 4, "talker_max_new_tokens": 5}


def audio_s_of(session: Session) -> float:
    return session._reply.audio_s


def test_messages_are_those_of_the_sessions_turns(omni) -> None:
    with omni.session("Be brief.", **SHORT) as session:
        session.append("Hello")
        first = last(session.respond())
        session.append("Look:")
        session.append([IMAGE])
        session.append_audio(tone(0.5), 16000)
        second = last(session.respond(speak=False))
        messages = session.messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "Hello"
    assert messages[2]["content"] == first.text
    assert [item["type"] for item in messages[3]["content"]] == ["text", "image", "audio"]
    assert messages[4]["content"] == second.text
    assert second.talker_finish_reason == "no_speech"
    assert omni.generate_text(messages[:4], **SHORT).token_ids == second.token_ids
    with omni.session(messages=messages, **SHORT) as other:
        assert_same_prompt(
            omni.prompt_builder.prompt([*other.messages, user(text("Go on."))]),
            omni.prompt_builder.prompt([*messages, user(text("Go on."))]),
        )


def test_appended_arrays_are_copied(omni) -> None:
    """Arrays of sound are read at once; an iterator can be read once only."""
    buffer = tone(0.6)
    arriving = {"type": "audio", "audio": iter([tone(0.5)]), "sampling_rate": 16000}
    with omni.session(**SHORT) as session:
        session.append_audio(buffer, 16000)
        session.append([{"type": "audio", "audio": buffer, "sampling_rate": 16000}, arriving])
        before = prompt_of(session)
        buffer[:] = 0
        assert_same_prompt(prompt_of(session), before)
        assert_same_prompt(omni.prompt_builder.prompt(session.messages), before)


def test_an_interrupted_reply_keeps_the_text_of_the_sound_that_was_sent(omni) -> None:
    options = {**GREEDY, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 200}
    with omni.session(**options) as session:
        session.append("Tell me more.")
        given = 0
        with session.respond(chunk_frames=[4]) as stream:
            for event in stream:
                given += isinstance(event, AudioChunk)
                if given == 3:
                    break
        assert audio_s_of(session) == pytest.approx((12 * 1920 - 555) / 24000)
        text = session.messages[-1]["content"]
        assert 0 < len(text.encode()) < 2 * BYTES_PER_S * audio_s_of(session) + 8
        session.append("Stop.")
        again = last(session.respond(**SHORT))
        assert session.messages[1]["content"] == text
        assert omni.generate_text(session.messages[:3], **SHORT).token_ids == again.token_ids


def test_a_stream_that_is_not_read_to_its_end_is_an_interrupted_reply(omni) -> None:
    with omni.session(**GREEDY) as session:
        session.append("Hello")
        for _ in session.respond():
            break
        gc.collect()
        session.append("Once more.")
        assert session._reply is not None and session._reply.ended
        assert session.messages[-1]["content"] == "Once more."


def test_content_can_be_appended_while_a_reply_streams(omni) -> None:
    with omni.session(**GREEDY) as session:
        session.append("Hello")
        stream = session.respond()
        next(stream)
        session.append_audio(tone(0.4), 16000)
        session.append("Wait!")
        with pytest.raises(MessageError, match="the last reply still streams"):
            session.respond()
        with pytest.raises(MessageError, match="Close its stream, then call heard"):
            session.heard(0)
        stream.close()
        assert [m["role"] for m in session.messages] == ["user", "user"]
        assert [item["type"] for item in session.messages[1]["content"]] == ["audio", "text"]
        assert len(last(session.respond(**SHORT)).codes) == 4


def finished(text: str, audio_s: float, reason: Any = "stop") -> Finished:
    timings = Timings(0, 0, 0, 0, audio_s, 0, 0, 0, 0, 0)
    nothing = np.zeros((0, 16), np.int64), np.zeros(0, np.float32)
    return Finished(SpeechResult(text, [], *nothing, 24000, "stop", reason, timings, 0))


def reply_of(texts: list[str], audio_s: float, end: bool = True, reason: Any = "stop") -> Reply:
    reply = Reply(True, BYTES_PER_S)
    for part in texts:
        reply.add(TextDelta(part, [1]))
    reply.add(AudioChunk(np.zeros(round(24000 * audio_s), np.float32), 0, 0))
    if end:
        reply.add(finished("".join(texts), audio_s, reason))
    reply.ended = True
    return reply


WORDS = ["One", " two", " three", " four", " five"]  # of 3, 4, 6, 5 and 5 bytes


@pytest.mark.parametrize(
    ("heard_s", "kept"),
    [(None, 5), (46, 5), (0, 0), (2.9, 0), (3.1, 1), (9.9, 1), (10.1, 2), (41.1, 5), (40.9, 4)],
)
def test_a_complete_reply_is_truncated_at_its_own_speaking_rate(heard_s, kept) -> None:
    """Two seconds a byte: a token stays when half of it was heard."""
    reply = reply_of(WORDS, 46.0)
    reply.heard_s = heard_s
    assert reply.text == "".join(WORDS[:kept])


def test_a_stopped_reply_is_truncated_at_the_default_speaking_rate() -> None:
    reply = reply_of(WORDS, 11 / BYTES_PER_S, end=False)
    assert reply.text == "One two three"
    reply.heard_s = 6 / BYTES_PER_S
    assert reply.text == "One two"
    # Speech that its limit cut does not say at what pace it would have gone on.
    cut = reply_of(WORDS, 11 / BYTES_PER_S, reason="length")
    cut.heard_s = 6 / BYTES_PER_S
    assert cut.text == "One two"


def test_a_rewritten_reply_is_truncated_in_proportion_to_the_sound_that_was_sent() -> None:
    reply = reply_of(WORDS, 46.0)
    reply.sent_s, reply.speed = 4.0, 1.5  # six seconds of the reply's own time
    reply.rewrite("0123456789")
    assert reply.text == "0123456789"
    for heard_s, left in ((3.0, "01234"), (1.2, "01"), (4.8, "01234567"), (46.0, "0123456789")):
        reply.heard_s = heard_s
        assert reply.text == left
    assert mean_pace([reply]) == BYTES_PER_S, "its sound does not tell how fast a text is spoken"
    reply.sent_s = 0.0
    assert reply.text == "0123456789"


def test_a_character_of_several_tokens_is_kept_or_dropped_as_a_whole() -> None:
    reply = reply_of(["Hi ", "\U0001f600", "\u4f60"], 10.0)  # of 3, 4 and 3 bytes
    for heard_s, kept in ((4.9, "Hi "), (5.1, "Hi \U0001f600"), (8.6, "Hi \U0001f600\u4f60")):
        reply.heard_s = heard_s
        assert reply.text == kept


def test_a_sessions_speaking_rate_is_the_mean_of_its_complete_replies() -> None:
    assert mean_pace([]) == BYTES_PER_S
    stopped = reply_of(WORDS, 5.0, end=False)
    expected = (BYTES_PER_S * RATE_WEIGHT_S + 23) / (RATE_WEIGHT_S + 46)
    assert mean_pace([reply_of(WORDS, 46.0), stopped]) == pytest.approx(expected)


def test_heard_removes_the_text_that_was_not_heard(omni) -> None:
    options = {**GREEDY, "thinker_max_new_tokens": 12, "talker_max_new_tokens": 30}
    with omni.session(**options) as session:
        session.append("Hello")
        result = last(session.respond())
        audio_s = len(result.audio) / 24000
        assert session.messages[-1]["content"] == result.text
        session.heard(audio_s / 2)
        half = session.messages[-1]["content"]
        assert half
        assert result.text.startswith(half)
        assert half != result.text
        session.heard(audio_s)
        assert session.messages[-1]["content"] == result.text
        session.heard(0)
        assert session.messages == [{"role": "user", "content": "Hello"}]
        again = last(session.respond())  # nothing of the answer was heard: the turn is open
        assert again.codes.tolist() == result.codes.tolist()


@pytest.mark.parametrize("value", [-0.1, 1e9, float("nan"), "long", None])
def test_heard_refuses_what_is_no_part_of_the_replys_sound(omni, value) -> None:
    with omni.session(**SHORT) as session:
        session.append("Hello")
        last(session.respond())
        with pytest.raises(
            OptionError, match=r"audio_s must be from 0 to 0\.\d+, the reply's audio"
        ):
            session.heard(value)


def test_respond_and_heard_are_refused_without_a_turn_or_a_reply(omni) -> None:
    with omni.session(**SHORT) as session:
        with pytest.raises(MessageError, match="nothing to answer"):
            session.respond()
        with pytest.raises(MessageError, match="no spoken reply"):
            session.heard(0)
        session.append_audio(np.zeros(0), 16000)  # nothing is no clip
        session.append_audio(np.zeros((0, 2)), 8000)
        with pytest.raises(MessageError, match="nothing to answer"):
            session.respond()
        session.append("Hello")
        last(session.respond(speak=False))
        with pytest.raises(MessageError, match="nothing to answer"):
            session.respond()
        with pytest.raises(MessageError, match="no spoken reply"):
            session.heard(0)


def test_a_refused_piece_of_sound_changes_nothing(omni) -> None:
    for piece, rate, said in (
        (np.zeros(5), 8000, "has 8000 Hz, but the clip's earlier pieces have 16000 Hz. End"),
        (np.zeros((5, 2)), 16000, "has 2 channels, but the earlier blocks have 1"),
        (np.array([0.1, np.nan]), 16000, "1 of 2 samples are NaN or larger"),
        (np.zeros((2, 2, 2)), 16000, r"has shape \[2, 2, 2\]"),
        (["a"], 16000, "is an array of"),
        (np.zeros(5), None, "is audio without its sampling_rate"),
        (np.zeros(5), 16, "supported. Give the rate in Hz"),
    ):
        clip = tone(0.5)
        with omni.session() as session:
            session.append_audio(clip[:4000], 16000)
            with pytest.raises(AudioError, match=said):
                session.append_audio(piece, rate)
            session.append_audio(clip[4000:], 16000)
            session.append("?")
            expected = [user({"type": "audio", "audio": (clip, 16000)}, text("?"))]
            assert_same_prompt(prompt_of(session), omni.prompt_builder.prompt(expected))


def test_refused_content_changes_nothing(omni) -> None:
    with omni.session("Be brief.", **SHORT) as session:
        session.append_audio(tone(0.01), 16000)
        with pytest.raises(AudioError, match=r"append_audio lasts 0.010 s .*the minimum is 0.03 s"):
            session.append("Hello")
        with pytest.raises(AudioError, match="the minimum is"):
            session.respond()
        with pytest.raises(ImageError, match=r"content\[1\]"):
            session.append([text("Look"), {"type": "image", "image": b"no"}])
        with pytest.raises(MessageError, match="stands for media in a prompt"):
            session.append("<|audio_pad|>")
        with pytest.raises(MessageError, match="content is blank"):
            session.append(" ")
        session.append_audio(tone(0.3), 16000)
        assert len(last(session.respond()).codes) == 4
        assert [item["type"] for item in session.messages[1]["content"]] == ["audio"]


def test_speech_and_conversations_longer_than_the_context_are_refused(checkpoint) -> None:
    with Qwen3Omni.load(checkpoint, context_length=80, max_concurrency=1) as omni:
        with omni.session(**SHORT) as session:
            with pytest.raises(PromptTooLongError, match=r"append_audio lasts .* s of audio\."):
                for _ in range(100):
                    session.append_audio(tone(0.5), 16000)
            assert session._clip.samples == 12 * 8000
            with pytest.raises(
                PromptTooLongError, match=r"KV cache has 80 .*let `truncation` drop"
            ):
                session.respond()
            messages = session.messages
        with omni.session(messages=messages[:0], **SHORT) as session:
            session.append("Hello")
            assert len(last(session.respond()).codes) == 4


def test_a_turn_whose_reply_did_not_begin_can_be_answered_again(checkpoint) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=1, max_queued=0) as omni:
        busy = omni.stream([user(text("Hello"))], **GREEDY)
        with omni.session(**SHORT) as session:
            session.append_audio(tone(0.4), 16000)
            with pytest.raises(BusyError):
                session.respond()
            busy.close()
            wait_until(lambda: not omni._pipeline._running)
            with pytest.raises(LateError, match="no first token"):
                list(session.respond(first_token_timeout_s=1e-9))
            wait_until(lambda: not omni._pipeline._running)
            assert len(last(session.respond()).codes) == 4
            assert [m["role"] for m in session.messages] == ["user", "assistant"]


@pytest.mark.parametrize("state", ["new", "growing", "streaming", "finished", "closed"])
def test_closing_in_any_state_frees_slots_and_threads(omni, state) -> None:
    threads = threading.active_count()
    session = omni.session(**(SHORT if state == "finished" else GREEDY))
    stream = None
    if state != "new":
        session.append_audio(tone(0.4), 16000)
    if state == "growing":
        session.append_audio(tone(9), 16000)
    if state in ("streaming", "finished"):
        stream = session.respond()
        next(stream)
    if state == "finished":
        last(stream)
    session.close()
    session.close()
    if stream is not None:
        assert list(stream) == []
    for use in (
        lambda: session.append("x"),
        lambda: session.append_audio(tone(1), 16000),
        session.respond,
        lambda: session.heard(0),
    ):
        with pytest.raises(ClosedError, match="this session was closed"):
            use()
    assert isinstance(session.messages, list)
    wait_until(lambda: not omni._pipeline._running)
    assert len(omni._pipeline._free_slots) == 3
    assert threading.active_count() == threads


def test_turns_are_inserted_removed_and_answered_in_any_order(omni) -> None:
    """Any order of any roles; the prompt is that of the messages."""
    with omni.session("Be brief.", **SHORT) as session:
        look = session.read(user(IMAGE))
        session.append_audio(tone(0.4), 16000)
        session.insert(look, session.commit())
        session.insert(session.read({"role": "assistant", "content": "Hm."}), look)
        session.insert(session.read({"role": "system", "content": "Now."}))
        gone = session.read(user(text("Not this")))
        session.insert(gone)
        session.remove(gone)
        with pytest.raises(MessageError, match="not in the session's history"):
            session.remove(gone)
        with pytest.raises(MessageError, match="no turn to end"):
            session.commit()
        session.append("What is it?")
        assert [m["role"] for m in session.messages] == [
            *("system", "assistant", "user", "system", "user")
        ]
        # An image alone is part of the turn after it.
        assert [item["type"] for item in session.messages[2]["content"]] == ["image", "audio"]
        messages = session.messages
        assert_same_prompt(omni.prompt_builder.prompt(messages), prompt_of(session))
        result = last(session.respond())
        assert result.codes.tolist() == omni.generate_audio(messages, **SHORT).codes.tolist()
        *_, reply = session.turns
        assert isinstance(reply, Reply)
        session.remove(reply)
        assert len(session.messages) == 5


def test_a_reply_to_given_turns_leaves_the_open_turn_open(omni) -> None:
    with omni.session("Be brief.", **SHORT) as session:
        session.append("Hello")
        first = session.commit()
        session.append_audio(tone(0.4), 16000)  # goes on while others are answered
        other = session.read(user(text("And?")))
        stream = session.respond(False, turns=[first, other], system="Be long.", keep=False)
        asked: list[dict[str, Any]] = [
            {"role": "system", "content": "Be long."},
            *(user(text("Hello")), user(text("And?"))),
        ]
        assert last(stream).text == omni.generate_text(asked, **SHORT).text
        assert session.turns == [first]
        reply = session.respond(turns=session.turns).reply
        assert session.turns == [first, reply]
        session.append_audio(tone(0.2), 16000)
        assert session.messages[0] == {"role": "system", "content": "Be brief."}
        assert len(session.messages[-1]["content"][0]["audio"]) == 9600
        session.clear()
        session.system = None
        assert [m["role"] for m in session.messages] == ["user"]


def test_calls_of_tools_join_the_assistants_message_before_them(omni) -> None:
    called = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    with omni.session(**SHORT) as session:
        session.append("Hello")
        session.commit()
        for content, calls in (("Let me look.", []), ("", [called]), ("", [called])):
            message = {"role": "assistant", "content": content, "tool_calls": calls}
            session.insert(session.read(message))
        session.insert(session.read({"role": "assistant", "content": ""}))  # nothing was said
        said, done = session.messages[1:], session.read({"role": "tool", "content": "5"})
        assert said == [
            {"role": "assistant", "content": "Let me look.", "tool_calls": [called, called]}
        ]
        session.insert(done)
        assert session.messages[2] == {"role": "tool", "content": "5"}
        with pytest.raises(MessageError, match="does not support tools"):
            session.respond()


def test_set_options_changes_the_replies_that_follow(omni) -> None:
    with omni.session(**SHORT) as session:
        session.append("Hello")
        session.set_options(thinker_max_new_tokens=2)
        assert len(last(session.respond(speak=False)).token_ids) == 2
        session.append("And?")
        session.set_options(thinker_max_new_tokens=3, thinker_eos_token_id=10**6)
        assert len(last(session.respond(speak=False)).token_ids) == 3
        session.append("So?")
        session.set_options(thinker_eos_token_id=10**6)
        assert len(last(session.respond(speak=False)).token_ids) == 1024
        with pytest.raises(OptionError, match="literal_text is False for the whole session"):
            session.set_options(literal_text=True)
        with pytest.raises(OptionError, match="Did you mean"):
            session.set_options(thinker_max_new_token=2)  # type: ignore[call-arg]


def test_a_reply_that_spells_a_special_token_is_only_words(omni) -> None:
    """A model may write the name in other tokens; the next turn has them, not the special one."""
    for literal in (False, True):
        for name in ("<|audio_pad|>", "<|image_pad|>", "<|im_end|>\n<|im_start|>"):
            with omni.session(literal_text=literal, **SHORT) as session:
                session.append_audio(tone(0.4), 16000)
                session.commit()
                reply = Reply(False, BYTES_PER_S)
                reply.add(TextDelta(f"a {name} b", [1]))
                session.insert(reply)
                session.append("Go on.")
                ids = prompt_of(session).token_ids.tolist()
                plain = omni.prompt_builder.encode_words(f"a {name} b")
                assert any(ids[i : i + len(plain)] == plain for i in range(len(ids)))
                assert last(session.respond()).text
