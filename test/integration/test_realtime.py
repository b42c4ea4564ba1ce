"""/v1/realtime, by OpenAI's own client over a socket: items, responses, and their events."""

import base64
import io
import json
from typing import Any

import pytest

from qwen3_omni_neuron.errors import BusyError, LateError
from qwen3_omni_neuron.prompt.turns import Reply, joined_turns
from qwen3_omni_neuron.session import Session
from testing.http_server import same_sound
from testing.media_cases import noise_image
from testing.realtime import (
    AFTER,
    BEFORE,
    LONG,
    PUSH_TO_TALK,
    SHORT,
    SPOKEN,
    calling,
    kinds,
    sound_of,
    text_of,
)
from testing.scripted_model import ScriptedStream

pytestmark = pytest.mark.usefixtures("nothing_is_left")
WRITTEN = [
    *("response.created", "rate_limits.updated", *BEFORE, "response.output_text.delta"),
    *("response.output_text.done", *AFTER, "response.done"),
]


def test_a_written_reply(omni, caller) -> None:
    caller.write("Hello")
    events = caller.answer(output_modalities=["text"])
    assert kinds(events) == WRITTEN
    result = omni.generate_text([{"role": "user", "content": "Hello"}], literal_text=True, **SHORT)
    assert text_of(events) == result.text
    response = events[-1].response
    assert (response.status, response.status_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_modalities == ["text"]


def test_instructions_options_and_voice(omni, caller) -> None:
    hello: Any = {"role": "user", "content": "Hello"}
    voice = omni.info.speakers[1]
    caller.update(instructions="Be brief.", audio={"output": {"voice": voice}})
    caller.write("Hello")
    first = caller.answer(seed=4, max_output_tokens=3)
    options: Any = {**SHORT, "literal_text": True, "speaker": voice}
    system: Any = {"role": "system", "content": "Be brief."}
    wanted = omni.generate_audio(
        [system, hello], **{**options, "seed": 4, "thinker_max_new_tokens": 3}
    )
    assert text_of(first) == wanted.text
    same_sound(sound_of(first), wanted.audio)
    assert first[-1].response.max_output_tokens == 3
    assert first[-1].response.usage.output_token_details.text_tokens == 3
    caller.write("And now?")
    other = omni.info.speakers[0]
    second = caller.answer(instructions="Be long.", audio={"output": {"voice": other}})
    said_so: Any = [
        *({"role": "system", "content": "Be long."}, hello),
        *({"role": "assistant", "content": wanted.text}, {"role": "user", "content": "And now?"}),
    ]
    result = omni.generate_audio(said_so, **{**options, "speaker": other})
    assert text_of(second) == result.text
    same_sound(sound_of(second), result.audio)
    assert second[-1].response.audio.output.voice == other


def test_a_response_of_conversation_none_stays_out_of_the_conversation(omni, caller) -> None:
    first = caller.write("Hello")
    caller.write("Not this")
    more = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Which?"}],
    }
    events = caller.answer(
        conversation="none",
        input=[{"type": "item_reference", "id": first.id}, more],
        output_modalities=["text"],
        metadata={"about": "this"},
    )
    assert "conversation.item.added" not in kinds(events)
    response = events[-1].response
    assert (response.conversation_id, response.metadata) == (None, {"about": "this"})
    turns: Any = [{"role": "user", "content": text} for text in ("Hello", "Which?")]
    assert text_of(events) == omni.generate_text(turns, literal_text=True, **SHORT).text
    both: Any = [{"role": "user", "content": text} for text in ("Hello", "Not this")]
    events = caller.answer(output_modalities=["text"])
    assert text_of(events) == omni.generate_text(both, literal_text=True, **SHORT).text


def test_a_greeting_before_anybody_has_said_anything(omni, caller) -> None:
    events = caller.answer(instructions="Greet.", output_modalities=["text"])
    asked: Any = [{"role": "system", "content": "Greet."}, {"role": "user", "content": ""}]
    assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text


def test_items_are_inserted_at_their_place_and_deleted(omni, caller) -> None:
    png = io.BytesIO()
    noise_image(64, 64).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    last = caller.write("What is it?")
    caller.write("Hm.", role="assistant", previous_item_id="root")
    hm = caller.heard[-1]
    assert hm.previous_item_id is None
    caller.write("Be brief.", role="system", previous_item_id="root")
    image = {
        "type": "message",
        "role": "user",
        "id": "image_1",
        "content": [{"type": "input_image", "image_url": url}],
    }
    caller.send("conversation.item.create", previous_item_id=hm.item.id, item=image)
    done = caller.until("conversation.item.done")[-1]
    assert (done.item.id, done.previous_item_id) == ("image_1", hm.item.id)
    gone = caller.write("Not this", previous_item_id="image_1")
    caller.send("conversation.item.delete", item_id=gone.id)
    assert caller.until("conversation.item.deleted")[-1].item_id == gone.id
    events = caller.answer(output_modalities=["text"])
    content = [{"type": "image", "image": png.getvalue()}, {"type": "text", "text": "What is it?"}]
    asked: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": content},
    ]
    assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text
    items = [e for e in events if e.type == "conversation.item.added"]
    assert items[0].previous_item_id == last.id
    caller.send("conversation.item.retrieve", item_id="image_1")
    assert caller.until("conversation.item.retrieved")[-1].item.content[0].image_url == url


def test_truncate_keeps_the_text_of_the_sound_that_was_heard(omni, caller) -> None:
    caller.update(**{**SHORT, "thinker_max_new_tokens": 12, "talker_max_new_tokens": 30})
    caller.write("Hello")
    events = caller.answer()
    item = events[-1].response.output[0]
    sent_ms = len(sound_of(events)) / 48
    cut: dict[str, Any] = {"item_id": item.id, "content_index": 0}
    caller.send("conversation.item.truncate", event_id="e1", audio_end_ms=int(sent_ms) + 2, **cut)
    error = caller.until("error")[-1].error
    assert (error.param, error.event_id) == ("audio_end_ms", "e1")
    assert str(int(sent_ms)) in error.message
    caller.send("conversation.item.truncate", audio_end_ms=int(sent_ms / 2), **cut)
    assert caller.until("conversation.item.truncated")[-1].audio_end_ms == int(sent_ms / 2)
    caller.send("conversation.item.retrieve", item_id=item.id)
    left = caller.until("conversation.item.retrieved")[-1].item.content[0].transcript
    assert left and item.content[0].transcript.startswith(left)
    assert left != item.content[0].transcript
    caller.write("Go on.")
    events = caller.answer(output_modalities=["text"], thinker_max_new_tokens=6)
    asked: Any = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": left},
        {"role": "user", "content": "Go on."},
    ]
    assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text


def test_clearing_output_truncates_all_answers_that_were_to_be_played(caller) -> None:
    """The second one is played after the first, and so not at all."""
    caller.update(**{**SHORT, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 90})
    caller.update(thinker_eos_token_id=10**6)
    caller.write("Hello")
    first = caller.answer()
    caller.write("Go on.")
    second = caller.answer()
    caller.send("output_audio_buffer.clear")
    *cuts, cleared = caller.until("output_audio_buffer.cleared")
    items = [events[-1].response.output[0].id for events in (first, second)]
    assert [cut.item_id for cut in cuts] == items
    assert 0 < cuts[0].audio_end_ms < len(sound_of(first)) / 48
    assert cuts[1].audio_end_ms == 0
    assert cleared.response_id == second[-1].response.id
    caller.send("output_audio_buffer.clear")  # nothing plays any more
    assert kinds(caller.until("output_audio_buffer.cleared")) == ["output_audio_buffer.cleared"]


def test_what_a_client_has_truncated_is_not_truncated_again(caller) -> None:
    caller.update(**{**SHORT, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 90})
    caller.update(thinker_eos_token_id=10**6)
    caller.write("Hello")
    item = caller.answer()[-1].response.output[0]
    fields = {"item_id": item.id, "content_index": 0, "audio_end_ms": 0}
    caller.send("conversation.item.truncate", **fields)
    caller.until("conversation.item.truncated")
    caller.send("output_audio_buffer.clear")
    assert kinds(caller.until("output_audio_buffer.cleared")) == ["output_audio_buffer.cleared"]


@pytest.mark.usefixtures("slow_steps")
def test_response_cancel_ends_the_running_response_alone(caller) -> None:
    caller.update(**LONG)
    caller.write("Hello")
    caller.send("response.create")
    caller.until("response.output_audio.delta")
    caller.send("response.create", event_id="twice")
    assert caller.until("error")[-1].error.code == "conversation_already_has_active_response"
    caller.send("response.cancel")
    done = caller.until("response.done")[-1].response
    assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
    caller.update(**SHORT, thinker_eos_token_id=None)
    assert caller.answer()[-1].response.output


TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
CALLED = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sky"}}\n</tool_call>'


def test_calls_of_tools(server, monkeypatch) -> None:
    """A reply's text before a call is spoken, the call an item; its result goes to the model."""
    asked: list[Any] = []

    def respond(session: Session, speak: bool = True, **options: Any) -> Any:
        turns = joined_turns(options["turns"])
        asked.append(([turn.message for turn in turns], options.get("tools")))
        stream: Any = ScriptedStream(["Let me ", "look. ", CALLED[:9], CALLED[9:]], speak, None)
        stream.reply = Reply(speak, 15.0)
        stream.reply.ended = True
        session.insert(stream.reply)
        return stream

    monkeypatch.setattr(Session, "respond", respond)
    with calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, tools=[TOOL])
        caller.write("What is above?")
        events = caller.answer()
        arguments = "response.function_call_arguments"
        assert kinds(events) == [
            *(*SPOKEN[:-1], *BEFORE[:2], f"{arguments}.delta", f"{arguments}.done"),
            *(*AFTER[1:], "response.done"),
        ]
        message, call = events[-1].response.output
        assert message.content[0].transcript == "Let me look. "
        assert len(sound_of(events)) == 3 * 1920 * 2  # the fourth chunk is behind the call
        assert (call.type, call.name, json.loads(call.arguments)) == (
            *("function_call", "look_up"),
            {"word": "sky"},
        )
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        caller.send("conversation.item.create", item=result)
        assert caller.until("conversation.item.done")[-1].previous_item_id == call.id
        caller.answer()
        caller.answer(tool_choice="none")
        caller.update(tools=[])
        caller.answer()
    (first, tools), (second, _), *without = asked
    assert [tools for _, tools in without] == [[], []]
    assert [message["role"] for message in first] == ["user"]
    assert tools[0]["function"]["name"] == "look_up"
    assert second[1]["content"] == "Let me look. "
    assert second[1]["tool_calls"][0]["function"]["name"] == "look_up"
    assert second[2] == {"role": "tool", "content": "blue"}
    assert [message["role"] for message in second] == ["user", "assistant", "tool"]


def test_a_reply_that_fails_is_a_response_that_says_so(server, monkeypatch) -> None:
    real, failures = Session.respond, [BusyError("all slots are in use."), LateError("too late.")]

    def respond(session: Session, speak: bool = True, **options: Any) -> Any:
        if not failures:
            return real(session, speak, **options)
        failure = failures.pop(0)
        if isinstance(failure, BusyError):
            raise failure
        stream: Any = ScriptedStream(["One ", "two"], speak, failure)
        stream.reply = Reply(speak, 15.0)
        stream.reply.ended = True
        session.insert(stream.reply)
        return stream

    monkeypatch.setattr(Session, "respond", respond)
    with calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, **SHORT)
        caller.write("Hello")
        busy = caller.answer()
        assert kinds(busy) == ["response.created", "rate_limits.updated", "response.done"]
        late = caller.answer()
        assert kinds(late) == SPOKEN
        for events, code in ((busy, "queue_full"), (late, "timeout")):
            response = events[-1].response
            assert response.status == "failed"
            assert response.status_details.error.code == code
        assert late[-1].response.output[0].status == "incomplete"
        assert text_of(late) == "One two"
        assert caller.answer()[-1].response.status != "failed"


def test_max_output_tokens_of_a_session_hold_until_it_is_updated(caller) -> None:
    caller.update(max_output_tokens=2, thinker_max_new_tokens=None)
    caller.write("Hello")
    text = {"output_modalities": ["text"], "thinker_eos_token_id": 10**6}
    for most, tokens in ((None, 2), (4, 4), ("inf", 1024), (None, 2)):
        asked = text if most is None else {**text, "max_output_tokens": most}
        usage = caller.answer(**asked)[-1].response.usage
        assert usage.output_token_details.text_tokens == tokens
