"""Bytes that requests and sessions hold: counted as they are in memory, refused before they are."""

import asyncio
import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image
from websockets.exceptions import ConnectionClosed

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.realtime.transcribing import Transcriber
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of, wait_until
from testing.raw_http import ASKED, CHAT, MODEL, connected, head_of
from testing.realtime import PUSH_TO_TALK, calling
from testing.websocket_client import opened

SHORT: dict[str, Any] = {"seed": 3, "thinker_max_new_tokens": 3, "talker_max_new_tokens": 4}
KEYS = ("one-key", "another-key")
SIDE = 256  # pixels of an image that is small as a file


@pytest.fixture(scope="module")
def server(omni) -> Iterator[Server]:
    with serving(omni, max_request_bytes=4 << 20, max_realtime_bytes=2 << 20) as running:
        yield running


def picture() -> str:
    """A data URL of one colour: some hundred bytes, and SIDE * SIDE pixels."""
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "red").save(file, "PNG")
    assert len(file.getvalue()) < 5000
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def flac(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * 1000, np.float32), 1000, format="FLAC")
    assert len(file.getvalue()) < 5000
    return file.getvalue()


def nothing_is_held(server: Server) -> None:
    wait_until(lambda: server.service.held.taken == 0)


def a_picture_item() -> dict[str, Any]:
    part = {"type": "input_image", "image_url": picture()}
    return {"type": "message", "role": "user", "content": [part]}


def test_pictures_of_a_session_count_as_they_are_decoded(server) -> None:
    with calling(server) as caller:
        for _ in range(20):
            caller.send("conversation.item.create", item=a_picture_item())
            event = caller.next()
            if event.type == "error":
                break
            caller.until("conversation.item.done")
        assert event.error.code == "session_too_large"
        assert 1 << 20 < server.service.held.taken <= 2 << 20
        held, items = server.service.held.taken, [e for e in caller.heard if "item.done" in e.type]
        assert len(items) <= (2 << 20) // (3 * SIDE * SIDE)
        caller.send("conversation.item.delete", item_id=items[0].item.id)
        caller.until("conversation.item.deleted")
        assert server.service.held.taken < held - 3 * SIDE * SIDE
        caller.send("conversation.item.create", item=a_picture_item())
        caller.until("conversation.item.done")
    nothing_is_held(server)


def test_pictures_of_a_request_that_are_too_much_are_refused_before_all_are_decoded(
    server, monkeypatch
) -> None:
    decoded: list[str] = []
    decode = server.service.decoder.decode

    async def counted(owner: str, job: Any, *others: Any, **named: Any) -> Any:
        decoded.append(job.where)
        return await decode(owner, job, *others, **named)

    monkeypatch.setattr(server.service.decoder, "decode", counted)
    content = [{"type": "image_url", "image_url": {"url": picture()}}] * 16
    messages: Any = [{"role": "user", "content": content}]
    with client_of(server) as client, pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**{**ASKED, "messages": messages})
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    assert len(decoded) < len(content)
    nothing_is_held(server)


def test_sound_counts_before_it_is_decoded(server) -> None:
    """Ten minutes in a file of a kilobyte are 110 MB with their features."""
    with client_of(server) as client, pytest.raises(openai.APIStatusError) as refused:
        client.audio.transcriptions.create(model=MODEL, file=("a.flac", flac(600)))
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    nothing_is_held(server)


def test_bytes_of_all_are_bounded_and_who_comes_later_may_try_again(omni) -> None:
    with serving(omni, max_held_bytes=4 << 20) as server, client_of(server) as client:
        with calling(server) as caller:
            caller.send("conversation.item.create", item=a_picture_item())
            caller.until("conversation.item.done")
            with pytest.raises(openai.InternalServerError) as refused:
                client.audio.transcriptions.create(model=MODEL, file=("a.flac", flac(30)))
            assert (refused.value.status_code, refused.value.code) == (503, "too_many_bytes")
            assert refused.value.response.headers["retry-after"]
            client.chat.completions.create(**ASKED)
        nothing_is_held(server)


def test_instructions_and_tools_of_a_session_count(server) -> None:
    with calling(server) as caller:
        caller.update(instructions="x" * 40_000)
        held = server.service.held.taken
        assert held >= 40_000
        caller.send("session.update", session={"type": "realtime", "instructions": "x" * 600_000})
        assert caller.until("error")[-1].error.code == "session_too_large"
        assert server.service.held.taken == held
        tool = {"type": "function", "name": "f", "description": "y" * 600_000}
        caller.send("session.update", session={"type": "realtime", "tools": [tool]})
        assert caller.until("error")[-1].error.code == "session_too_large"
        caller.update(instructions="")
        assert server.service.held.taken < held
    nothing_is_held(server)


def test_input_of_one_response_counts_while_it_is_made(server) -> None:
    with calling(server) as caller:
        caller.update(output_modalities=["text"], **SHORT)
        held = server.service.held.taken
        own = [a_picture_item() for _ in range(20)]
        caller.send("response.create", response={"input": own, "conversation": "none"})
        assert caller.until("error")[-1].error.code == "session_too_large"
        # The event's own bytes are held until the next one is read.
        wait_until(lambda: server.service.held.taken == held)
        caller.answer(input=own[:1], conversation="none")
        wait_until(lambda: server.service.held.taken == held)


def test_clips_that_wait_to_be_transcribed_count(server, monkeypatch) -> None:
    """Six turns of a second are 1.2 MB, and their sound that waits is there once more."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Transcriber, "_transcribe", never)
    sound = {"input": {**PUSH_TO_TALK["input"], "transcription": {}}}
    with calling(server) as caller:
        caller.update(audio=sound, **SHORT)
        for _ in range(6):
            caller.say(np.tile(np.array([0.1, -0.1], np.float32), 8000), 16000)
            caller.send("input_audio_buffer.commit")
        event = caller.next()
        while event.type != "error":
            event = caller.next()
        assert event.error.code == "session_too_large"
    nothing_is_held(server)


def test_a_message_counts_until_the_next_one_is_read(omni) -> None:
    with serving(omni, max_held_bytes=3 << 20) as server:
        with opened(url_of(server)) as sock:
            sock.send("x" * (2 << 20))
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    sock.recv(timeout=20)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "too_many_bytes")
        with calling(server) as caller:
            for _ in range(5):  # what was read is not held any more
                caller.send("conversation.item.retrieve", item_id="x" * 200_000)
                assert caller.until("error")[-1].error.code == "invalid_value"
        nothing_is_held(server)


SPOKEN: dict[str, Any] = {"seed": 12, "talker_max_new_tokens": 300, "runaway_speech": "keep"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {**ASKED, **SPOKEN, "modalities": ["text", "audio"], "audio": {}}),
        ("/v1/audio/speech", {"input": "Hello", "voice": "alloy", "response_format": "wav"}),
    ],
)
def test_an_answer_counts_until_its_client_has_taken_it(server, path, asked) -> None:
    sent = json.dumps({**asked, **SPOKEN, "max_tokens": None}).encode()
    with connected(url_of(server)) as sock:
        sock.sendall(head_of(len(sent), path) + sent)
        begun = sock.recv(1 << 10)
        assert begun.startswith(b"HTTP/1.1 200")
        size = int(re.search(rb"content-length: (\d+)", begun)[1])  # type: ignore[index]
        pcm = size * 3 / 4 if path == CHAT else size  # of 16 bits; the samples have 32
        assert size > 300_000 and server.service.held.taken > size + 1.9 * pcm
    nothing_is_held(server)


def test_one_key_can_not_take_all_sessions(omni) -> None:
    with serving(omni, api_keys=KEYS, max_realtime_sessions=4) as server:
        with calling(server, KEYS[0]), calling(server, KEYS[0]):
            with pytest.raises(Exception, match="429"), calling(server, KEYS[0]):
                pass
            with calling(server, KEYS[1]) as other:
                other.update(**SHORT)
        wait_until(lambda: server.service.sessions.taken == 0)


def test_one_key_can_not_take_the_whole_queue(checkpoint) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=1, max_queued=3) as omni:
        endless: dict[str, Any] = {**ASKED, "stream": True}
        endless["extra_body"] = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 3000}
        with (
            serving(omni, api_keys=KEYS) as server,
            client_of(server, KEYS[0]) as one,
            client_of(server, KEYS[1]) as two,
        ):
            streams = [one.chat.completions.create(**{**endless, "max_tokens": 3000})]
            assert next(iter(streams[0]))
            server.service.requests.take(next(iter(server.service.requests._by_owner)))
            with pytest.raises(openai.RateLimitError) as refused:
                one.chat.completions.create(**ASKED)
            assert refused.value.code == "queue_full"
            streams[0].close()
            assert two.chat.completions.create(**ASKED).choices[0].finish_reason == "length"


def test_what_a_request_held_comes_back_however_it_ends(server) -> None:
    with client_of(server) as client:
        client.chat.completions.create(**ASKED)
        for body in (b"{", b"x" * 10_000, json.dumps({**ASKED, "model": "other"}).encode()):
            assert ask(url_of(server) + CHAT, body).status >= 400
    nothing_is_held(server)
    wait_until(lambda: server.service.requests.taken == 0)
