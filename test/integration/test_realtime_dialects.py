"""/v1/realtime in other dialects: OpenAI's beta's, by its client, and DashScope's, by messages."""

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import pytest
from openai.types.beta.realtime import RealtimeServerEvent
from websockets.sync.client import ClientConnection, connect

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.realtime.audio_codecs import Resampler
from qwen3_omni_neuron.serving.realtime.dialects import BETA, DASHSCOPE, Dialect, Interpreter
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.sound.encoding import pcm16
from testing.http_server import client_of, same_sound, url_of, wait_until
from testing.media_cases import noise_image
from testing.realtime import SHORT, WAIT_S, question, said

KINDS = get_args(get_args(RealtimeServerEvent)[0])
BETA_EVENTS = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in KINDS}
DASHSCOPE_PATH = "/api-ws/v1/realtime?model=qwen3-omni-flash-realtime"
SDK = {"x-dashscope-sdk-client": "dashscope/2.0.2"}
SPOKEN = [
    *("response.created", "rate_limits.updated", "response.output_item.added"),
    *("conversation.item.created", "response.content_part.added"),
    *("delta", "response.audio.done", "response.audio_transcript.done"),
    *("response.content_part.done", "response.output_item.done", "response.done"),
]
# What DashScope's SDK 2.0.2 sends as session, with turn detection off.
SDK_SESSION: dict[str, Any] = {
    **{"modalities": ["text", "audio"], "voice": "Cherry"},
    **{"input_audio_format": "pcm16", "output_audio_format": "pcm16"},
    **{"input_audio_transcription": None, "turn_detection": None},
}


class Flat:
    """One open session of a flat dialect."""

    def __init__(self, connection: ClientConnection):
        self._connection = connection

    def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self._connection.recv(timeout=WAIT_S))
        return event

    def until(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] != kind:
            found.append(self.next())
            assert kind == "error" or found[-1]["type"] != "error", found[-1]
        return found

    def send(self, kind: str, **fields: Any) -> None:
        self._connection.send(json.dumps({"event_id": "mine", "type": kind, **fields}))

    def update(self, **fields: Any) -> dict[str, Any]:
        self.send("session.update", session=fields)
        session: dict[str, Any] = self.until("session.updated")[-1]["session"]
        return session

    def say(self, samples: Any, rate: int) -> None:
        sound = Resampler(16000, rate).push(samples, last=True)
        for start in range(0, len(sound), rate // 10):
            data = base64.b64encode(pcm16(sound[start : start + rate // 10])).decode()
            self.send("input_audio_buffer.append", audio=data)


@contextmanager
def flat(
    server: Server, path: str, headers: Mapping[str, str] | None = None
) -> Iterator[tuple[Flat, dict[str, Any]]]:
    """Open a session, and take its first event's session."""
    url = f"{url_of(server, 'ws')}{path}"
    with connect(url, additional_headers=headers, max_size=None) as connection:
        caller = Flat(connection)
        created = caller.next()
        assert created["type"] == "session.created"
        yield caller, created["session"]


@pytest.fixture(autouse=True)
def _nothing_is_left(omni: Qwen3Omni) -> Iterator[None]:
    yield
    wait_until(lambda: not omni.status().running and not omni.status().queued)


def order(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of events; successive deltas count once, whatever their kinds."""
    kinds = (event["type"] for event in events)
    return list(dict.fromkeys("delta" if kind.endswith(".delta") else kind for kind in kinds))


def sound(events: Sequence[Mapping[str, Any]]) -> bytes:
    parts = [e["delta"] for e in events if e["type"] == "response.audio.delta"]
    return b"".join(map(base64.b64decode, parts))


def test_openais_client_of_the_beta_speaks(omni: Qwen3Omni, server: Server) -> None:
    """By its header, at 24 kHz, every event being of the beta's types."""
    client = client_of(server).with_options(websocket_base_url=f"{url_of(server, 'ws')}/v1")
    with client.beta.realtime.connect(model="gpt-4o-realtime-preview") as connection:
        socket = connection._connection

        def until(kind: str) -> list[Any]:
            found: list[Any] = []
            while not found or found[-1]["type"] != kind:
                found.append(json.loads(data := socket.recv(timeout=WAIT_S)))
                # Its type has OpenAI's models alone.
                data = data.replace(f'"{server.settings.model_name}"', '"gpt-realtime"')
                BETA_EVENTS[found[-1]["type"]].model_validate_json(data)
                assert found[-1]["type"] != "error", found[-1]
            return found

        created = until("session.created")[-1]["session"]
        assert created["modalities"] == ["text", "audio"]
        assert (created["input_audio_format"], created["output_audio_format"]) == ("pcm16",) * 2
        asked: Any = {"voice": "nova", "turn_detection": None, "temperature": 0, **SHORT}
        connection.session.update(session=asked | {"instructions": "Be brief."})
        session = until("session.updated")[-1]["session"]
        assert (session["voice"], session["temperature"]) == ("Chelsie", 0)
        assert session["turn_detection"] is None
        heard = Resampler(16000, 24000).push(question(), last=True)
        connection.input_audio_buffer.append(audio=base64.b64encode(pcm16(heard)).decode())
        connection.input_audio_buffer.commit()
        item = until("conversation.item.created")[-1]["item"]
        assert item["content"][0]["type"] == "input_audio"
        connection.response.create()
        events = until("response.done")
        assert order(events) == SPOKEN
        response = events[-1]["response"]
        assert (response["voice"], response["modalities"]) == ("Chelsie", ["text", "audio"])
        part = response["output"][0]["content"][0]
        sent = np.frombuffer(pcm16(heard), "<i2").astype(np.float32) / 32768
        samples = Resampler(24000, 16000).push(sent, last=True)
        content = {"role": "user", "content": [{"type": "audio", "audio": samples}]}
        content["content"][0]["sampling_rate"] = 16000  # type: ignore[index]
        messages: Any = [{"role": "system", "content": "Be brief."}, content]
        greedy = {"thinker_do_sample": False, "speaker": "Chelsie", "literal_text": True}
        result = omni.generate_audio(messages, **{**SHORT, **greedy})
        assert part == {"type": "audio", "transcript": result.text}
        same_sound(sound(events), result.audio)
        # The reply, sent back as the beta has it, and a response in text.
        back: Any = {"type": "message", "role": "assistant"}
        back["content"] = [{"type": "text", "text": "Eight."}]
        connection.conversation.item.create(item=back)
        assert until("conversation.item.created")[-1]["item"]["content"] == back["content"]
        connection.response.create(response={"modalities": ["text"]})
        events = until("response.done")
        assert "response.text.done" in order(events)
        assert events[-1]["response"]["output"][0]["content"][0]["type"] == "text"


def test_a_flat_first_update_is_the_betas(server: Server) -> None:
    """Without the header, too; what is set before it leaves open what the client speaks."""
    with flat(server, "/v1/realtime") as (caller, created):
        assert created["type"] == "realtime"
        assert caller.update(instructions="Be brief.")["output_modalities"] == ["audio"]
        session = caller.update(modalities=["text"], input_audio_format="g711_ulaw")
        assert (session["modalities"], session["input_audio_format"]) == (["text"], "g711_ulaw")
        assert "audio" not in session and "output_modalities" not in session
    with flat(server, "/v1/realtime", {"OpenAI-Beta": "realtime=v1"}) as (caller, created):
        assert "audio" not in created
        session = caller.update(type="realtime", output_modalities=["text"])  # today's after all
        assert session["output_modalities"] == ["text"]
    with flat(server, "/v1/realtime") as (caller, _):
        caller.update(type="realtime")
        caller.send("session.update", session={"voice": "alloy"})
        assert caller.until("error")[-1]["error"]["param"] == "session.voice"


@pytest.mark.parametrize(
    ("path", "headers", "formats"),
    [
        (DASHSCOPE_PATH, {}, ("pcm16", "pcm16")),
        ("/v1/realtime", SDK, ("pcm16", "pcm16")),
        ("/v1/realtime", SDK, ()),
        ("/v1/realtime", {}, ("pcm", "pcm")),
        ("/v1/realtime", {}, ("pcm16", "pcm24")),
        ("/v1/realtime", {}, ({"type": "pcm", "sample_rate": 16000}, {"type": "pcm"})),
    ],
)
def test_dashscopes_clients_are_heard_at_16_khz(
    omni: Qwen3Omni, server: Server, path: str, headers: dict[str, str], formats: Any
) -> None:
    """By path, header or format; the same sound at another rate has another answer."""
    given = {name: v for name, v in SDK_SESSION.items() if not name.endswith("_format")}
    if formats and isinstance(formats[0], dict):
        sides = zip(("input", "output"), formats, strict=True)
        given["audio"] = {side: {"format": form} for side, form in sides}
    elif formats:
        given |= dict(zip(("input_audio_format", "output_audio_format"), formats, strict=True))
    samples = question()
    with flat(server, path, headers) as (caller, created):
        if "model=" in path or headers:
            assert created["object"] == "realtime.session"
            assert created.keys() >= {"id", "model", "tools", "turn_detection", "modalities"}
            assert created["input_audio_format"] == created["output_audio_format"] == "pcm"
        session = caller.update(**given, **SHORT)
        assert (session["voice"], session["input_audio_transcription"]) == ("Chelsie", None)
        caller.say(samples, 16000)
        caller.send("input_audio_buffer.commit")
        caller.until("conversation.item.created")
        nothing = {"instructions": None, "modalities": ["text", "audio"]}
        caller.send("response.create", response=nothing)
        events = caller.until("response.done")
        assert order(events) == SPOKEN
        result = omni.generate_audio([said(samples)], **SHORT, speaker="Chelsie", literal_text=True)
        transcript = "".join(
            e["delta"] for e in events if e["type"] == "response.audio_transcript.delta"
        )
        assert transcript == result.text
        same_sound(sound(events), result.audio)
        caller.send("session.finish")
        assert caller.next()["type"] == "session.finished"


def test_a_frame_of_dashscopes_is_an_image_of_the_turn(omni: Qwen3Omni, server: Server) -> None:
    jpeg = io.BytesIO()
    noise_image(64, 64).save(jpeg, "JPEG")
    samples = question()
    with flat(server, DASHSCOPE_PATH) as (caller, _):
        caller.update(**SDK_SESSION | {"modalities": ["text"], "voice": None}, **SHORT)
        caller.say(samples, 16000)
        image = base64.b64encode(jpeg.getvalue()).decode()
        caller.send("input_image_buffer.append", image=image)
        caller.until("conversation.item.created")
        caller.send("input_audio_buffer.commit")
        caller.send("response.create")
        events = caller.until("response.done")
        message: Any = said(samples)
        message["content"].insert(0, {"type": "image", "image": jpeg.getvalue()})
        text = omni.generate_text([message], literal_text=True, **SHORT).text
        assert "".join(e["delta"] for e in events if e["type"] == "response.text.delta") == text
        for wrong in (None, 5):
            caller.send("input_image_buffer.append", image=wrong)
            error = caller.until("error")[-1]["error"]
            assert (error["param"], error["event_id"]) == ("image", "mine")


def test_session_finished_comes_after_the_response(server: Server) -> None:
    with flat(server, DASHSCOPE_PATH) as (caller, _):
        caller.update(**SDK_SESSION | SHORT)
        caller.send("response.create")
        caller.send("session.finish")
        assert order(caller.until("session.finished"))[-2:] == ["response.done", "session.finished"]


@pytest.mark.parametrize(
    ("headers", "wrong", "param"),
    [
        ({}, {"voice": "Bob"}, "session.voice"),
        ({}, {"input_audio_format": "mp3"}, "session.input_audio_format"),
        ({}, {"modalities": ["audio"]}, "session.modalities"),
        ({}, {"modalities": [[]]}, "session.modalities"),
        ({}, {"turn_detection": {"type": "server_vad", "threshold": 2}},
         "session.turn_detection.threshold"),
        ({}, {"modalities": ["text"], "audio": {}}, "session.modalities"),
        ({}, {"type": "realtime", "audio": {"input": {"format": {"type": "pcm16"}}}},
         "session.audio.input.format.type"),
        (SDK, {"input_audio_format": "pcm24"}, "session.input_audio_format"),
        (SDK, {"enable_search": True}, "session.enable_search"),
        (SDK, {"translation": {"language": "en"}}, "session.translation"),
        (SDK, {"audio": {"input": {"format": {"type": "wav"}}}}, "session.input_audio_format"),
        (SDK, {"audio": {"input": {"format": {"type": "pcm", "sample_rate": 8000}}}},
         "session.input_audio_format.sample_rate"),
        (SDK, {"temperature": -1}, "session.temperature"),
    ],
)  # fmt: skip
def test_after_a_refused_first_update_no_sound_is_taken(
    server: Server, headers: dict[str, str], wrong: dict[str, Any], param: str
) -> None:
    """Errors name the fields that the client knows."""
    with flat(server, "/v1/realtime", headers) as (caller, _):
        caller.send("session.update", session=wrong)
        error = caller.until("error")[-1]["error"]
        assert (error["param"], error["event_id"]) == (param, "mine")
        for _ in range(2):
            caller.say(np.zeros(1600, np.float32), 16000)
            error = caller.until("error")[-1]["error"]
            assert (error["code"], error["param"]) == ("session_not_updated", "audio")
        off: Any = {"turn_detection": None}
        today = not headers and "audio" in wrong
        caller.update(**{"audio": {"input": off}} if today else off)
        caller.send("session.update", session=wrong)  # a later one that is refused changes nothing
        caller.until("error")
        caller.say(np.zeros(16000, np.float32), 16000)
        caller.send("input_audio_buffer.commit")
        caller.until("input_audio_buffer.committed")


def test_dashscopes_format_holds_from_the_first_update_that_is_taken() -> None:
    """Also where the one that told the dialect was refused."""
    interpreter = Interpreter("/v1/realtime", {})
    told = {"output_audio_format": "pcm24", "voice": "Bob"}
    rate = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}}
    for session in (told, {"voice": "Cherry"}):
        made = interpreter.heard({"type": "session.update", "session": session})
        assert made["session"]["audio"]["input"] == rate["audio"]["input"]
    shown = {"session": {"type": "realtime", "audio": {"input": {}, "output": {}}}}
    assert interpreter.told("session.updated", shown) is not None
    made = interpreter.heard({"type": "session.update", "session": {"voice": "Cherry"}})
    assert made["session"] == {"audio": {"output": {"voice": "Cherry"}}}


TOOL = {"name": "f", "description": "F", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("dialect", "given", "wanted"),
    [
        (BETA, {"temperature": 0.8}, {"thinker_temperature": 0.8, "thinker_do_sample": True}),
        (BETA, {"max_response_output_tokens": 5, "speed": None, "seed": 3},
         {"max_output_tokens": 5, "seed": 3}),
        (BETA, {"input_audio_transcription": None, "voice": None},
         {"audio": {"input": {"transcription": None}}}),
        (DASHSCOPE, {"tools": [{"type": "function", "function": TOOL}], "smooth_output": True},
         {"tools": [{"type": "function", **TOOL}]}),
        (DASHSCOPE, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
         {"tool_choice": {"type": "function", "name": "f"}}),
        (DASHSCOPE, {"turn_detection": {"type": "server_vad", "threshold": 0.2}},
         {"audio": {"input": {"turn_detection": {
             "type": "server_vad", "threshold": 0.2, "silence_duration_ms": 800}}}}),
        (DASHSCOPE, {"turn_detection": {"type": "semantic_vad", "threshold": 0.2}},
         {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}),
        (DASHSCOPE, {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 9,
                     "presence_penalty": 0.5, "enable_search": False},
         {"thinker_top_p": 0.9, "thinker_top_k": 20, "thinker_repetition_penalty": 1.05,
          "max_output_tokens": 9, "thinker_presence_penalty": 0.5}),
        (DASHSCOPE, {"input_audio_format": "pcm", "sample_rate": 24000},
         {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}}}}),
    ],
)  # fmt: skip
def test_fields_of_a_flat_session(
    dialect: Dialect, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    made = dialect.heard({"type": "session.update", "session": given})
    assert made == {"type": "session.update", "session": wanted}


def test_tools_are_shown_as_the_dialect_has_them() -> None:
    session = {"type": "realtime", "tools": [{"type": "function", **TOOL}], "audio": {}}
    for dialect, shown in (
        (BETA, {"type": "function", **TOOL}),
        (DASHSCOPE, {"type": "function", "function": TOOL}),
    ):
        told = dialect.told("session.updated", {"session": session})
        assert told is not None and told[1]["session"]["tools"] == [shown]
