"""/v1/realtime in DashScope's events."""

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.serving.realtime import dashscope
from qwen3_omni_neuron.serving.realtime.audio_codecs import Resampler
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import same_sound, url_of
from testing.media_cases import noise_image
from testing.realtime import SHORT, WAIT_S, question, said

pytestmark = pytest.mark.usefixtures("nothing_is_left")
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


def order(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of events; successive deltas count once, whatever their kinds."""
    kinds = (event["type"] for event in events)
    return list(dict.fromkeys("delta" if kind.endswith(".delta") else kind for kind in kinds))


def sound(events: Sequence[Mapping[str, Any]]) -> bytes:
    parts = [e["delta"] for e in events if e["type"] == "response.audio.delta"]
    return b"".join(map(base64.b64decode, parts))


def test_dashscopes_clients_are_heard_at_16_khz(omni, server) -> None:
    for path, headers, formats in (
        (DASHSCOPE_PATH, {}, ("pcm16", "pcm16")),
        ("/v1/realtime", SDK, ("pcm16", "pcm16")),
        ("/v1/realtime", SDK, ()),
        ("/v1/realtime", SDK, ("pcm", "pcm24")),
    ):
        given = {name: v for name, v in SDK_SESSION.items() if not name.endswith("_format")}
        if formats:
            given |= dict(zip(("input_audio_format", "output_audio_format"), formats, strict=True))
        samples = question()
        with flat(server, path, headers) as (caller, created):
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
            result = omni.generate_audio(
                [said(samples)], **SHORT, speaker="Chelsie", literal_text=True
            )
            transcript = "".join(
                e["delta"] for e in events if e["type"] == "response.audio_transcript.delta"
            )
            assert transcript == result.text
            same_sound(sound(events), result.audio)
            caller.send("session.finish")
            assert caller.next()["type"] == "session.finished"


def test_a_frame_of_dashscopes_is_an_image_of_the_turn(omni, server) -> None:
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


def test_session_finished_comes_after_the_response(server) -> None:
    with flat(server, DASHSCOPE_PATH) as (caller, _):
        caller.update(**SDK_SESSION | SHORT)
        caller.send("response.create")
        caller.send("session.finish")
        assert order(caller.until("session.finished"))[-2:] == ["response.done", "session.finished"]


@pytest.mark.parametrize(
    ("headers", "wrong", "param"),
    [
        ({}, {"modalities": ["audio"]}, "session.modalities"),
        (SDK, {"voice": "Bob"}, "session.voice"),
        (SDK, {"modalities": [[]]}, "session.modalities[0]"),
        (SDK, {"turn_detection": {"type": "server_vad", "threshold": 2}},
         "session.turn_detection.threshold"),
        ({}, {"type": "realtime", "audio": {"input": {"format": {"type": "pcm16"}}}},
         "session.audio.input.format.type"),
        (SDK, {"input_audio_format": "mp3"}, "session.input_audio_format"),
        (SDK, {"enable_search": True}, "session.enable_search"),
        (SDK, {"translation": {"language": "en"}}, "session.translation"),
        (SDK, {"temperature": -1}, "session.temperature"),
    ],
)  # fmt: skip
def test_after_a_refused_first_update_no_sound_is_taken(server, headers, wrong, param) -> None:
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
        caller.update(**off if headers else {"type": "realtime", "audio": {"input": off}})
        caller.send("session.update", session=wrong)  # a later one that is refused changes nothing
        caller.until("error")
        caller.say(np.zeros(16000, np.float32), 16000)
        caller.send("input_audio_buffer.commit")
        caller.until("input_audio_buffer.committed")


TOOL = {"name": "f", "description": "F", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"temperature": 0.8}, {"thinker_temperature": 0.8, "thinker_do_sample": True}),
        ({"max_tokens": 5, "speed": None, "seed": 3},
         {"max_output_tokens": 5, "seed": 3}),
        ({"input_audio_transcription": None, "voice": None},
         {"audio": {"input": {"transcription": None}}}),
        ({"tools": [{"type": "function", "function": TOOL}], "smooth_output": True},
         {"tools": [{"type": "function", **TOOL}]}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}},
         {"tool_choice": {"type": "function", "name": "f"}}),
        ({"turn_detection": {"type": "server_vad", "threshold": 0.2}},
         {"audio": {"input": {"turn_detection": {
             "type": "server_vad", "threshold": 0.2, "silence_duration_ms": 800}}}}),
        ({"turn_detection": {"type": "semantic_vad", "threshold": 0.2}},
         {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}),
        ({"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 9,
                     "presence_penalty": 0.5, "enable_search": False},
         {"thinker_top_p": 0.9, "thinker_top_k": 20, "thinker_repetition_penalty": 1.05,
          "max_output_tokens": 9, "thinker_presence_penalty": 0.5}),
    ],
)  # fmt: skip
def test_fields_of_a_flat_session(given, wanted) -> None:
    made = dashscope.heard({"type": "session.update", "session": given})
    assert made == {"type": "session.update", "session": wanted}


def test_tools_are_shown_as_dashscope_has_them() -> None:
    session = {"type": "realtime", "tools": [{"type": "function", **TOOL}], "audio": {}}
    told = dashscope.told("session.updated", {"session": session})
    assert told[1]["session"]["tools"] == [{"type": "function", "function": TOOL}]
