"""Clients of /v1/realtime that send nonsense, too much or nothing, may not come in, or go away."""

import base64
import gc
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from qwen3_omni_neuron.engines.process.heap import keep_all
from qwen3_omni_neuron.prompt.turns import Turn
from qwen3_omni_neuron.serving.realtime.live_session import LiveSession
from qwen3_omni_neuron.serving.realtime.response_stream import Response
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.session import Session
from testing.http_server import serving, url_of, wait_until
from testing.raw_http import connected
from testing.realtime import PCM_16K, PUSH_TO_TALK, Caller, calling
from testing.repeats import examples
from testing.websocket_client import opened, received

SHORT: dict[str, Any] = {"seed": 3, "thinker_max_new_tokens": 3, "talker_max_new_tokens": 4}
LONG = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 3000, "chunk_frames": [1]}
LONG |= {"talker_max_new_tokens": 4000, "seed": 3}


@pytest.fixture(autouse=True)
def _nothing_is_left(omni) -> Iterator[None]:
    """Every test leaves all slots free, and no thread of a session."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not omni.status().running and not omni.status().queued)
    new = lambda: set(threading.enumerate()) - before  # noqa: E731
    wait_until(lambda: not any(thread.name.startswith("realtime") for thread in new()))


def refusal(server: Server, **options: Any) -> tuple[int, dict[str, Any]]:
    """Return status and error of a socket that is not opened."""
    with pytest.raises(InvalidStatus) as refused:
        opened(url_of(server), **options)
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]


def text_item(**fields: Any) -> dict[str, Any]:
    part = {"type": "input_text", "text": "Hello"}
    return {"type": "message", "role": "user", "content": [part], **fields}


def a_session(**fields: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime", **fields}}


def an_input(**fields: Any) -> dict[str, Any]:
    return a_session(audio={"input": fields})


def an_item(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": text_item(**fields)}


APPEND = "input_audio_buffer.append"
RETRIEVED = "item_retrieve_invalid_item_id"
VAD = "session.audio.input.turn_detection"
CUT: dict[str, Any] = {"type": "conversation.item.truncate", "item_id": "none"}
WRONG: list[tuple[Any, str | None, str]] = [
    ({"type": "session.end"}, "type", "unknown_event"),
    ({"type": 5}, "type", "unknown_event"),
    ({}, "type", "unknown_event"),
    ({"type": APPEND}, "audio", "missing_required_parameter"),
    ({"type": APPEND, "audio": 5}, "audio", "invalid_type"),
    ({"type": APPEND, "audio": "no base64!"}, "audio", "invalid_base64"),
    ({"type": APPEND, "audio": "AAA="}, None, ""),  # two bytes: a sample
    ({"type": APPEND, "audio": "AA=="}, "audio", "invalid_value"),
    ({"type": APPEND, "audio": "AAAA" * ((5 << 20) + 8)}, "audio", "audio_too_large"),
    ({"type": APPEND, "audio": "", "more": 1}, "more", "unknown_parameter"),
    (an_input(turn_detection={"type": "semantic_vad", "eagerness": 1}), f"{VAD}.eagerness", ""),
    (an_input(turn_detection={"type": "server_vad", "threshold": 2}), f"{VAD}.threshold", ""),
    (an_input(turn_detection={"type": "x"}), f"{VAD}.type", "invalid_value"),
    (an_input(format={"type": "audio/mp3"}), "session.audio.input.format.type", ""),
    (an_input(noise_reduction={"type": "x"}), "session.audio.input.noise_reduction.type", ""),
    (a_session(audio={"output": {"voice": "Bob"}}), "session.audio.output.voice", ""),
    (a_session(audio={"output": {"speed": 1.6}}), "session.audio.output.speed", ""),
    (a_session(model="gpt"), "session.model", "invalid_value"),
    (a_session(output_modalities=["text", "audio"]), "session.output_modalities", ""),
    (a_session(max_output_tokens=0), "session.max_output_tokens", ""),
    (a_session(temperatur=1), "session.temperatur", "unknown_parameter"),
    (a_session(seed=-(2**63) - 1), "session.seed", "invalid_value"),
    (a_session(modalities=["text"]), "session.modalities", "unknown_parameter"),  # the beta's name
    (a_session(use_audio_in_video=True), "session.use_audio_in_video", "unknown_parameter"),
    (a_session(tools=[{"type": "mcp"}]), "session.tools", "unsupported"),
    (
        a_session(truncation={"type": "retention_ratio", "retention_ratio": 1.5}),
        "session.truncation",
        "invalid_value",
    ),
    (a_session(type="transcription", instructions=""), "session.instructions", "unknown_parameter"),
    (a_session(type="transcription", audio={"output": {}}), "session.audio.output", ""),
    (a_session(type="translation"), "session.type", ""),
    ({"type": "session.update", "session": []}, "session", "invalid_type"),
    (an_item(content=[{"type": "input_text"}]), "item.content[0].text", "missing_field"),
    (an_item(content=[{"type": "output_text", "text": ""}]), "item.content[0].type", ""),
    (an_item(content="Hello"), "item.content", "invalid_type"),
    (an_item(role="tool"), "item.role", "invalid_value"),
    ({**an_item(), "previous_item_id": "none"}, "previous_item_id", "item_not_found"),
    (an_item(content=[{"type": "input_image", "image_url": "/etc/passwd"}]), None, "*"),
    (an_item(content=[{"type": "input_image", "image_url": "file:///etc/passwd"}]), None, "*"),
    ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "item.type", ""),
    ({"type": "conversation.item.retrieve", "item_id": "none"}, "item_id", RETRIEVED),
    ({"type": "conversation.item.delete", "item_id": ""}, "item_id", "invalid_value"),
    ({**CUT, "content_index": 0, "audio_end_ms": 1}, "item_id", "item_truncate_invalid_item_id"),
    ({**CUT, "content_index": 0, "audio_end_ms": -1}, "audio_end_ms", "invalid_value"),
    ({"type": "response.create", "response": {"seed": "x"}}, "response.seed", ""),
    ({"type": "response.create", "response": {"input": [{}]}}, "response.input[0].type", ""),
    ({"type": "response.create", "response": {"tool_choice": "required"}}, None, "*"),
    ({"type": "response.cancel", "response_id": "x"}, "response_id", ""),
    ({"type": "input_audio_buffer.commit"}, None, "input_audio_buffer_commit_empty"),
]


@pytest.mark.parametrize("sent", range(len(WRONG)))
def test_a_wrong_event_is_an_error_that_names_it(shared, sent) -> None:
    event, param, code = WRONG[sent]
    shared.send(**{"kind": event.pop("type", None), **event, "event_id": f"mine {sent}"})
    if param is None and not code:
        return
    error = shared.until("error")[-1].error
    assert error.event_id == f"mine {sent}"
    assert error.type == "invalid_request_error"
    assert error.message
    if code != "*":
        assert error.param == param
    if code not in ("", "*"):
        assert error.code == code


@pytest.fixture(scope="module")
def shared(server) -> Iterator[Caller]:
    """One session for all wrong events, which still answers after them."""
    with calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, **SHORT)
        yield caller
        caller.send("input_audio_buffer.clear")
        caller.write("Hello")
        assert caller.answer()[-1].response.output


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '"a"', "null", "[" * 5000, b"\0\1"])
def test_a_message_that_is_no_event_gets_an_error(shared, text) -> None:
    shared.connection._connection.send(text)
    code = shared.until("error")[-1].error.code
    assert code == ("body_too_complex" if text == "[" * 5000 else "invalid_json")


def test_an_event_beyond_all_limits_ends_its_session_alone(server) -> None:
    with calling(server) as other, calling(server) as caller:
        with pytest.raises(ConnectionClosed):
            caller.connection._connection.send("x" * (25 << 20))
            caller.until("error")
        other.update(**SHORT)


def test_half_of_a_surrogate_pair_is_refused_wherever_an_event_has_it(server) -> None:
    half: Any = "a \ud800"
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": half}]}
    with calling(server) as caller:
        for event in (
            a_session(instructions=half),
            a_session(tools=[{"type": "function", "name": "f", "parameters": {half: half}}]),
            {"type": "conversation.item.create", "item": item},
            {"type": "response.create", "response": {"instructions": half}},
            {"type": half},
        ):
            caller.connection._connection.send(json.dumps(event))
            assert caller.until("error")[-1].error.code == "invalid_json", event
        assert caller.update(instructions="a 😀", **SHORT).instructions == "a 😀"


def test_random_events_leave_their_session_answering(omni, server) -> None:
    dice = random.Random(7)
    sound = base64.b64encode(np.zeros(800, "<i2").tobytes()).decode()
    values: list[Any] = [None, 0, -1, 1.5, 2**70, "", "x", "\ud800", [], [[]], {}, True, sound]
    values += [{"type": "message"}, text_item(), {"type": "item_reference", "id": "a"}, "é" * 999]
    fields = ["session", "audio", "item", "item_id", "previous_item_id", "response", "event_id"]
    fields += ["content_index", "audio_end_ms", "response_id", "type"]
    right: list[Any] = [
        an_item(),
        an_item(id="a"),
        {"type": APPEND, "audio": sound},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "output_audio_buffer.clear"},
        {"type": "response.create"},
        {"type": "response.create", "response": {"output_modalities": ["text"]}},
        {"type": "response.cancel"},
        {"type": "conversation.item.delete", "item_id": "a"},
        {"type": "conversation.item.retrieve", "item_id": "a"},
        {**CUT, "item_id": "a", "content_index": 0, "audio_end_ms": 10},
        an_input(turn_detection=None, format=PCM_16K),
        an_input(turn_detection={"type": "server_vad"}),
        an_input(format={"type": "audio/pcmu"}),
        a_session(instructions="Be brief."),
    ]
    with calling(server) as caller:
        caller.update(**SHORT)
        raw = caller.connection._connection
        taken: list[Any] = []

        def read() -> None:
            for text in raw:
                taken.append(json.loads(text))
                if taken[-1].get("error", {}).get("event_id") == "the last one":
                    return

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(examples(4000)):
            event = dict(dice.choice(right))
            for _ in range(dice.choice((0, 0, 1, 1, 2))):
                event[dice.choice(fields)] = dice.choice(values)
            if dice.random() < 0.1:
                event.pop("type", None)
            raw.send(json.dumps(event))
        raw.send(json.dumps({"type": "no event", "event_id": "the last one"}))
        reader.join(120)
        assert not reader.is_alive()
        errors = [event["error"] for event in taken if event["type"] == "error"]
        assert len(errors) > 500
        assert not [error for error in errors if error["type"] == "server_error"]
    with calling(server) as caller:
        caller.update(**SHORT)
        caller.write("Hello")
        assert caller.answer()[-1].response.output
    wait_until(lambda: not omni.status().running)


def test_a_page_of_another_host_may_not_open_it(omni) -> None:
    with serving(omni, allowed_origins=("https://example.org",)) as server:
        own = f"http://127.0.0.1:{server.port}"
        for origin in (own, "https://example.org", None):
            with opened(url_of(server), origin=origin) as made:
                assert received(made, 10)["type"] == "session.created"
        for origin in ("https://example.com", f"http://localhost:{server.port}", "null"):
            status, error = refusal(server, origin=origin)
            assert (status, error["code"]) == (403, "origin_not_allowed")
        # A name that was made to mean this machine, as its page would send it.
        with connected(url_of(server)) as sock:
            head = ["GET /v1/realtime HTTP/1.1", "Host: evil.example", "Upgrade: websocket"]
            head += ["Connection: Upgrade", "Sec-WebSocket-Version: 13"]
            head += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Origin: http://evil.example"]
            sock.sendall("\r\n".join([*head, "", ""]).encode())
            assert b" 403 " in sock.recv(100)


def test_a_socket_of_another_model_or_path_is_refused(server) -> None:
    status, error = refusal(server, path="/v1/realtime?model=other")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    with pytest.raises(InvalidStatus, match="404"):
        opened(url_of(server), path="/v1/nothing")


def test_the_number_and_duration_of_sessions_are_limited(omni) -> None:
    with serving(omni, max_realtime_sessions=1, max_realtime_s=1.5) as server:
        with calling(server) as caller:
            status, error = refusal(server)
            assert (status, error["code"]) == (503, "too_many_sessions")
            assert caller.until("error")[-1].error.code == "session_expired"
            with pytest.raises(ConnectionClosed):
                caller.next()
        wait_until(lambda: not server.service.metrics.realtime_sessions._value.get())
        with calling(server):
            pass


def test_the_bytes_of_a_session_are_limited(omni) -> None:
    with serving(omni, max_realtime_bytes=600_000) as server, calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, **SHORT)
        second = np.zeros(16000, np.float32)  # 192,000 bytes with its features
        caller.say(np.tile(second, 3), 16000)
        caller.say(second, 16000)
        error = caller.until("error")[-1].error
        assert error.code == "session_too_large" and "600000" in error.message
        caller.send("input_audio_buffer.commit")
        item = caller.until("conversation.item.done")[-1].item
        caller.say(second, 16000)
        assert caller.until("error")[-1].error.code == "session_too_large"
        caller.send("conversation.item.delete", item_id=item.id)
        caller.until("conversation.item.deleted")
        caller.say(second, 16000)
        caller.send("input_audio_buffer.clear")
        caller.until("input_audio_buffer.cleared")


def test_responses_count_towards_the_rate(omni) -> None:
    with serving(omni, requests_per_minute=3) as server, calling(server) as caller:
        caller.update(**SHORT)
        caller.write("Hello")
        left = []
        for _ in range(2):
            events = caller.answer()
            (limit,) = next(e for e in events if e.type == "rate_limits.updated").rate_limits
            assert (limit.name, limit.limit) == ("requests", 3)
            left.append(limit.remaining)
        assert left == [1, 0]
        caller.send("response.create", event_id="more")
        error = caller.until("error")[-1].error
        assert (error.code, error.event_id) == ("rate_limit_exceeded", "more")


@pytest.mark.parametrize("way", ["closes", "vanishes", "vanishes in an answer"])
def test_a_session_is_freed_as_it_ends(server, way) -> None:
    """Not when the garbage collector comes: hundreds of conversations end before that."""
    keep_all()  # so that few objects are looked through
    gc.disable()
    try:
        before = kept()
        with calling(server) as caller:
            sound = {"format": PCM_16K, "turn_detection": None, "transcription": {"model": "any"}}
            caller.update(audio={"input": sound}, **SHORT)
            caller.say(np.random.default_rng(1).standard_normal(16000, np.float32) / 4)
            caller.send("input_audio_buffer.commit")
            caller.until("conversation.item.input_audio_transcription.completed")
            caller.answer()
            if way == "vanishes in an answer":
                caller.send("response.create", response=LONG)
                caller.until("response.output_audio.delta")
            assert kept() != before
            if way != "closes":
                caller.connection._connection.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: kept() == before)
    finally:
        gc.enable()


def kept() -> dict[str, int]:
    """Return how many objects there are of each type that has a session's data."""
    kinds = (LiveSession, Response, Session, Turn)
    found = Counter(type(made) for made in gc.get_objects())
    return {kind.__name__: found[kind] for kind in kinds}


@pytest.mark.usefixtures("slow_steps")
def test_a_server_that_ends_says_so_and_lets_the_reply_end(omni) -> None:
    with serving(omni) as server, calling(server) as idle, calling(server) as busy:
        busy.update(**{**SHORT, "thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 300})
        busy.write("Hello")
        busy.send("response.create")
        busy.until("response.created")
        server.stop()
        assert idle.until("error")[-1].error.code == "server_draining"
        with pytest.raises(ConnectionClosed) as closed:
            idle.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        seen = [busy.next().type]
        while seen[-1] != "response.done":
            seen.append(busy.next().type)
        assert "error" in seen
