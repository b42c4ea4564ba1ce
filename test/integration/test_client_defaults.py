"""Default requests of OpenAI's clients, to every endpoint: taken, answered, and counted.

The sessions are what each client sends with nothing set but address and key, and for those that
have no default what their users configure.
"""

import base64
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.endpoints.speech import SpeechRequest
from qwen3_omni_neuron.serving.openai.bodies import is_model
from qwen3_omni_neuron.serving.openai.chat_request import AudioOutput
from qwen3_omni_neuron.serving.openai.fields import OTHER_VOICES, REALTIME, names_in, seed_of
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, same_sound, serving, url_of, wait_until
from testing.realtime import SHORT, Caller, calling, sound_of, text_of

PCM = {"type": "audio/pcm", "rate": 24000}
TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]

# The first session of a voice call of Open WebUI 0.12.4.
VOICE_CALL: dict[str, Any] = {
    "type": "realtime",
    "audio": {
        "input": {
            "transcription": TRANSCRIPTION,
            "turn_detection": {
                "type": "server_vad",
                "interrupt_response": True,
                "create_response": False,
            },
        },
        "output": {"voice": "alloy"},
    },
    "tools": [TOOL],
}
# A session of wyoming-openai 0.8.0 for speech to text, with each of its settings.
TRANSCRIBING: dict[str, Any] = {
    "type": "transcription",
    "audio": {
        "input": {
            "format": PCM,
            "transcription": {
                "model": "gpt-4o-mini-transcribe",
                "languages": ["en", "de"],
                "prompt": "A smart home.",
            },
            "turn_detection": None,
        }
    },
}


def counted(server: Server) -> dict[tuple[str, str], float]:
    """Return the counts of fields without effect, by path and field."""
    text = ask(f"{url_of(server)}/metrics").body.decode()
    name = "qwen3_omni_fields_without_effect_total"
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.labels["path"], s.labels["field"]): s.value for s in samples if s.name == name}


def test_a_clients_first_session_is_taken_and_answered(omni, server) -> None:
    before = counted(server)
    with calling(server, model=None) as caller:
        caller.send("session.update", event_id="update_0", session=VOICE_CALL)
        updated = caller.next()
        assert updated.type == "session.updated", updated
        session = updated.session
        assert session.model == server.settings.model_name
        assert session.audio.output.voice in omni.info.speakers
        assert session.tool_choice in ("auto", "none")
        caller.update(**SHORT, tools=[])  # the template of this checkpoint takes none
        caller.write("Hello")
        events = caller.answer(output_modalities=["audio"])
        assert events[-1].response.audio.output.voice == session.audio.output.voice
        assert events[-1].response.status in ("completed", "incomplete")
    found = {
        field: value - before.get((path, field), 0)
        for (path, field), value in counted(server).items()
        if path == REALTIME and value > before.get((path, field), 0)
    }
    assert set(found) == {"audio.input.transcription.model"}
    wait_until(lambda: not omni.status().running)


def test_a_clients_first_session_of_type_transcription_is_taken(omni, server) -> None:
    before = counted(server)
    client = client_of(server)
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        caller = Caller(connection)
        assert caller.next().session.type == "transcription"
        caller.send("session.update", session=TRANSCRIBING)
        assert caller.next().type == "session.updated"
        caller.say(np.zeros(24000, np.float32))
        caller.send("input_audio_buffer.commit")
        kind = "conversation.item.input_audio_transcription"
        events = caller.until(f"{kind}.completed")
    deltas = [event.delta for event in events if event.type == f"{kind}.delta"]
    assert "".join(deltas) == events[-1].transcript
    assert not any(event.type.startswith("response.") for event in events)
    name = "audio.input.transcription"
    found = {
        f for (p, f), n in counted(server).items() if p == REALTIME and n > before.get((p, f), 0)
    }
    assert found == {f"{name}.model", f"{name}.languages", f"{name}.prompt"}
    wait_until(lambda: not omni.status().running)


def test_an_operators_voice_aliases_come_after_the_checkpoints_and_before_openais_names(
    omni,
) -> None:
    aliases = "marin=Aiden", "Robot = ethan"
    with serving(omni, voice_aliases=aliases) as server, calling(server) as caller:
        for asked, speaks in (
            *(("marin", "Aiden"), ("robot", "Ethan"), ("MARIN", "Aiden")),
            *(("cedar", OTHER_VOICES["cedar"]), ({"id": "sage"}, OTHER_VOICES["sage"])),
        ):
            assert caller.update(audio={"output": {"voice": asked}}).audio.output.voice == speaks
    missing = r"'marin=Bob' is for a voice 'Bob'.* It has Aiden"
    with pytest.raises(OptionError, match=missing), serving(omni, voice_aliases=("marin=Bob",)):
        pass


def test_speech_of_a_realtime_reply_at_another_speed(omni, caller) -> None:
    options: Any = {**SHORT, "thinker_max_new_tokens": 12, "talker_max_new_tokens": 30}
    caller.update(**options)
    whole = omni.generate_audio(HELLO, literal_text=True, **options)
    left = {}
    for speed in (1.0, 1.5, 0.5):
        assert caller.update(audio={"output": {"speed": speed}}).audio.output.speed == speed
        asked = caller.write("Hello")
        item = {"type": "item_reference", "id": asked.id}
        events = caller.answer(input=[item])
        samples = len(sound_of(events)) // 2
        assert text_of(events) == whole.text
        assert samples == round(len(whole.audio) / speed)
        made = events[-1].response.output[0]
        cut = {"item_id": made.id, "content_index": 0}
        played_ms = samples / 24
        caller.send("conversation.item.truncate", audio_end_ms=int(played_ms) + 2, **cut)
        assert caller.until("error")[-1].error.param == "audio_end_ms"
        caller.send("conversation.item.truncate", audio_end_ms=int(played_ms / 2), **cut)
        caller.until("conversation.item.truncated")
        caller.send("conversation.item.retrieve", item_id=made.id)
        back = caller.until("conversation.item.retrieved")[-1].item
        left[speed] = back.content[0].transcript
    assert 0 < len(left[1.0]) < len(whole.text)
    assert left[1.5] == left[1.0] == left[0.5]


def test_tools_of_type_mcp_are_refused_by_name_and_the_rest_is_taken(caller) -> None:
    """First comes session.updated, for which clients wait, then the error."""
    remote = [{"type": "mcp", "server_label": f"label {n}", "server_url": "x"} for n in range(10)]
    given = {"type": "realtime", "instructions": "Be brief.", "tools": [*remote, TOOL]}
    caller.send("session.update", event_id="mine", session=given)
    updated, refused = caller.next(), caller.next()
    assert (updated.type, updated.session.instructions) == ("session.updated", "Be brief.")
    assert [tool.name for tool in updated.session.tools] == ["look_up"]
    assert (refused.error.event_id, refused.error.param) == ("mine", "session.tools")
    assert "10 tools are of type mcp ('label 0', " in refused.error.message
    assert "label 8" not in refused.error.message
    caller.send("response.create", response={"tools": remote[:1]})
    assert caller.until("error")[-1].error.param == "response.tools[0].type"


def test_errors_that_clients_know(caller) -> None:
    """Codes by which LiveKit's and Pipecat's clients go on, and the beginning of a message."""
    caller.send("response.cancel")
    error = caller.until("error")[-1].error
    assert error.code == "response_cancel_not_active"
    assert error.message.startswith("Cancellation failed")
    caller.send("conversation.item.delete", item_id="none")
    assert caller.until("error")[-1].error.code == "item_delete_invalid_item_id"
    item = {"type": "message", "role": "user", "id": "twice"}
    item["content"] = [{"type": "input_text", "text": "Hello"}]
    caller.send("conversation.item.create", item=item)
    caller.until("conversation.item.done")
    caller.send("conversation.item.create", item=item)
    assert caller.until("error")[-1].error.code == "item_create_duplicate_item_id"


def test_an_assistants_message_with_input_text(omni, caller) -> None:
    caller.write("Hello")
    part = {"type": "input_text", "text": "Hm."}
    item = {"type": "message", "role": "assistant", "content": [part]}
    caller.send("conversation.item.create", item=item)
    shown = caller.until("conversation.item.done")[-1].item
    assert shown.content[0].to_dict() == {"type": "output_text", "text": "Hm."}
    caller.write("And?")
    events = caller.answer(output_modalities=["text"])
    asked: Any = [
        *(*HELLO, {"role": "assistant", "content": "Hm."}),
        {"role": "user", "content": "And?"},
    ]
    assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text


@pytest.mark.parametrize("ratio", [None, 0.8])
def test_old_items_leave_the_prompt_and_stay_in_the_conversation(omni, caller, ratio) -> None:
    words, context = "a word " * 40, omni.info.context_length
    question = {"role": "user", "content": words}
    size = len(omni.prompt_builder.prompt([question] * 2)) - len(
        omni.prompt_builder.prompt([question])
    )
    if ratio is None:
        assert caller.update().truncation == "auto"
        kept = (context - SHORT["thinker_max_new_tokens"] - 3) // size  # 3: the reply's beginning
        turns = context // size + 2
    else:
        limits = {"post_instructions": 4 * size}
        cut = {"type": "retention_ratio", "retention_ratio": ratio, "token_limits": limits}
        assert caller.update(truncation=cut).truncation.model_dump() == cut
        kept, turns = 3, 5
    first, *_ = [caller.write(words).id for _ in range(turns)]
    events = caller.answer(output_modalities=["text"])
    asked: Any = [question] * kept
    assert events[-1].response.usage.input_tokens == len(omni.prompt_builder.prompt(asked))
    assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text
    caller.send("conversation.item.retrieve", item_id=first)
    assert caller.until("conversation.item.retrieved")[-1].item.content[0].text == words


def test_a_chat_is_cut_where_it_asks_for_it(omni, client) -> None:
    asked: Any = [{"role": "system", "content": "Be brief."}, *HELLO * 40, *HELLO]
    kept = [asked[0], *HELLO]
    cut = {"type": "retention_ratio", "retention_ratio": 0.0}
    own: Any = {"truncation": {**cut, "token_limits": {"post_instructions": 60}}, **SHORT}
    del own["seed"]
    options: Any = {"model": "qwen3-omni", "seed": SHORT["seed"], "extra_body": own}
    made = client.chat.completions.create(messages=asked, **options)
    assert made.usage.prompt_tokens == len(omni.prompt_builder.prompt(kept))
    wanted = omni.generate_text(kept, literal_text=True, **SHORT).text
    assert made.choices[0].message.content == wanted
    own["truncation"]["retention_ratio"] = 2
    with pytest.raises(openai.BadRequestError, match="truncation must be auto, disabled or"):
        client.chat.completions.create(messages=asked, **options)
    del own["truncation"]  # disabled
    with pytest.raises(openai.BadRequestError, match="let `truncation` drop its oldest turns"):
        client.chat.completions.create(messages=HELLO * 2000, **options)


def test_truncation_disabled_until_the_conversation_is_too_long(caller) -> None:
    assert caller.update(truncation="disabled").truncation == "disabled"
    caller.write("Hello")
    assert caller.answer()[-1].response.output
    for number in range(40):
        caller.write("a word " * 40, previous_item_id=None if number else "root")
    caller.send("response.create")
    assert caller.until("error")[-1].error.code == "context_length_exceeded"


def test_a_negative_seed_is_a_seed(omni, client, caller) -> None:
    options: Any = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
    wanted = omni.generate_audio(
        HELLO, literal_text=True, seed=2**63 - 5, speaker="Ethan", **options
    )
    asked: Any = {"model": "gpt-4o-audio-preview", "messages": HELLO, "extra_body": options}
    asked |= {"modalities": ["text", "audio"], "audio": {"voice": "ash", "format": "pcm16"}}
    made = client.chat.completions.create(**asked, seed=-5).choices[0].message
    assert made.audio.transcript == wanted.text
    same_sound(base64.b64decode(made.audio.data), wanted.audio)
    other = client.chat.completions.create(**asked, seed=-6).choices[0].message
    assert other.audio.data != made.audio.data
    caller.update(seed=-5, audio={"output": {"voice": "Ethan"}})
    caller.write("Hello")
    same_sound(sound_of(caller.answer()), wanted.audio)
    assert [seed_of(n) for n in (-1, -(2**63), 3)] == [2**63 - 1, 0, 3]


def test_a_chat_with_names_and_fields_of_openai(server, client) -> None:
    """The answer names the model and the voice that answer."""
    before = counted(server)
    path = "/v1/chat/completions"
    tools: Any = [{"type": "function", "function": {"name": "f", "strict": True}}]
    fields: dict[str, Any] = {
        **{"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "flex"},
        **{"reasoning_effort": "low", "verbosity": "low", "parallel_tool_calls": False},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "prompt_cache_retention": "24h"},
        **{"prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"a": 1}},
        **{"request_id": "r1", "rid": "r2", "return_stage_metrics": True},
    }
    asked: Any = {"model": "gpt-4o-audio-preview", "messages": HELLO, "tool_choice": "none"}
    asked |= {"modalities": ["text", "audio"], "tools": tools}
    asked["extra_body"] = {**fields, "thinker_max_new_tokens": 4, "talker_max_new_tokens": 4}
    whole = client.chat.completions.create(**asked, audio={"voice": "nova", "format": "wav"})
    assert whole.model == server.settings.model_name
    assert whole.choices[0].message.audio.to_dict()["voice"] == OTHER_VOICES["nova"]
    found = {f for (p, f), n in counted(server).items() if p == path and n > before.get((p, f), 0)}
    assert found == names_in(path, "")
    voice = {"voice": {"id": "onyx"}, "format": "pcm16"}
    first = next(iter(client.chat.completions.create(**asked, audio=voice, stream=True)))
    assert first.model == server.settings.model_name
    assert first.choices[0].delta.to_dict()["audio"]["voice"] == OTHER_VOICES["onyx"]


def test_formats_and_models_have_the_names_that_clients_write() -> None:
    for asked, given in (("PCM", "pcm16"), ("pcm16", "pcm16"), ("Ogg", "opus"), ("AAC", "aac")):
        assert AudioOutput.model_validate({"format": asked}).format == given
    for asked, given in (("PCM16", "pcm"), ("ogg", "opus"), ("AAC", "aac")):
        body = {"input": "Hi", "voice": "nova", "response_format": asked}
        assert SpeechRequest.model_validate(body).response_format == given
    for wrong in ("m4a", 3, None):
        with pytest.raises(ValidationError):
            AudioOutput.model_validate({"format": wrong})
    assert is_model("openai/gpt-4o", "own") and is_model("openai/own", "own")
    assert not is_model("other/own", "own")
