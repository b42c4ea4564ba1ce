"""Keys, rates and the queue: what one owner may see and take, and when it is told to wait."""

import json
import time
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.edge import keys
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of
from testing.raw_http import ASKED, HELLO, connected, head_of, status_of, still_answers
from testing.realtime import SHORT, calling, text_of


def test_a_key_is_needed_where_there_are_keys(omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        for key in ("one", "two"):
            with client_of(server, key) as client:
                client.chat.completions.create(**ASKED)
        with client_of(server, "three") as client:
            for call in (lambda: client.chat.completions.create(**ASKED), client.models.list):
                with pytest.raises(Exception, match="401"):
                    call()
        for path, status in (("metrics", 401), ("ready", 200)):
            assert ask(f"{url_of(server)}/{path}").status == status
        # Without a key not even the body is read.
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(300_000))
            assert status_of(sock.recv(1000)) == 401


def test_another_key_can_not_name_a_spoken_reply(omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        spoken: Any = {**ASKED, "modalities": ["audio"], "audio": {"format": "wav"}}
        spoken["extra_body"] = {"talker_max_new_tokens": 3}
        with client_of(server, "one") as one, client_of(server, "two") as two:
            audio = one.chat.completions.create(**spoken).choices[0].message.audio
            turns: Any = [*HELLO, {"role": "assistant", "audio": {"id": audio.id}}, *HELLO]
            one.chat.completions.create(**{**ASKED, "messages": turns})
            with pytest.raises(openai.BadRequestError, match="never existed"):
                two.chat.completions.create(**{**ASKED, "messages": turns})


def test_rows_are_shared_within_a_key_alone(omni) -> None:
    words: Any = {**ASKED, "messages": [{"role": "user", "content": "only this test asks so"}]}

    def cached(server: Server, key: str) -> int:
        with client_of(server, key) as client:
            usage = client.chat.completions.create(**words).usage
        return usage.prompt_tokens_details.cached_tokens or 0

    with serving(omni, api_keys=("uno", "due")) as server:
        assert cached(server, "uno") == 0
        assert cached(server, "uno") > 10
        assert cached(server, "due") == 0


def test_a_caller_who_asks_too_often_is_told_when_to_come_back(omni) -> None:
    with serving(omni, requests_per_minute=2) as server, client_of(server) as client:
        for _ in range(2):
            client.chat.completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ASKED)
        assert 25 <= int(refused.value.response.headers["retry-after"]) <= 31


def test_a_full_queue_is_a_429(checkpoint) -> None:
    with (
        Qwen3Omni.load(checkpoint, max_concurrency=1, max_queued=1) as omni,
        serving(omni) as server,
        client_of(server) as client,
    ):
        streams = [omni.stream(HELLO) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="requests wait") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        still_answers(url_of(server))


def made_secret(server: Server, key: str, **body: Any) -> Any:
    with client_of(server, key) as client:
        return client.realtime.client_secrets.create(**body)


def test_a_client_secret_opens_sessions_of_its_owner_until_it_expires(omni, monkeypatch) -> None:
    settings: dict[str, Any] = {"instructions": "Be brief.", "type": "realtime"}
    settings["audio"] = {"output": {"voice": "Ethan"}, "input": {"turn_detection": None}}
    limits: dict[str, Any] = {"max_realtime_sessions": 4, "owner_share": 0.25}
    with serving(omni, api_keys=("one", "two"), **limits) as server:
        made = made_secret(server, "one", session=settings)
        assert made.value.startswith("ek_")
        assert made.expires_at == pytest.approx(time.time() + 600, abs=5)
        assert (made.session.type, made.session.instructions) == ("realtime", "Be brief.")
        with calling(server, made.value) as caller:
            session = caller.heard[0].session
            assert (session.instructions, session.audio.output.voice) == ("Be brief.", "Ethan")
            caller.write("Hello")
            events = caller.answer(output_modalities=["text"], **SHORT)
            asked: Any = [{"role": "system", "content": "Be brief."}, *HELLO]
            assert text_of(events) == omni.generate_text(asked, literal_text=True, **SHORT).text
            assert caller.update(instructions="Be long.").instructions == "Be long."
            with pytest.raises(InvalidStatus, match="429"), calling(server, "one"):
                pass  # the owner's one session is open
            with calling(server, "two"):
                pass
        with client_of(server, made.value) as client:
            for call in (client.models.list, client.realtime.client_secrets.create):
                with pytest.raises(openai.AuthenticationError):
                    call()
        with browser_socket(server, made.value) as socket:
            assert socket.subprotocol == "realtime"
            assert json.loads(socket.recv())["session"]["audio"]["output"]["voice"] == "Ethan"
        wrong = [made.value[:-1], made.value + "AAAA", "ek_", "ek_!", "ek_" + "A" * 60, "ek"]
        wrong += [made.value.replace("ek_", "ek_A"), made.value[:10] + "-" + made.value[11:]]
        assert refused_as(server, "three") == 401
        for value in wrong:
            assert refused_as(server, value) == 401, value
        short = made_secret(server, "two", expires_after={"anchor": "created_at", "seconds": 10})
        assert short.expires_at == pytest.approx(time.time() + 10, abs=5)
        now = time.time()
        monkeypatch.setattr(keys.time, "time", lambda: now + 11)
        assert refused_as(server, short.value) == 401
        monkeypatch.undo()
    with serving(omni, api_keys=("three", "one")) as restarted:
        with calling(restarted, made.value) as caller:
            assert caller.heard[0].session.instructions == "Be brief."
        assert refused_as(restarted, short.value) == 401  # its key is gone


def browser_socket(server: Server, key: str) -> ClientConnection:
    """Open a socket as OpenAI's client for browsers does."""
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{key}")]
    return connect(f"{url_of(server, 'ws')}/v1/realtime", subprotocols=offered)


def refused_as(server: Server, key: str) -> int:
    """Return the status with which a socket is refused."""
    with pytest.raises(InvalidStatus) as refused, calling(server, key):
        pass
    return refused.value.response.status_code


def test_a_secret_of_a_server_without_keys_opens_a_session_with_its_settings(server) -> None:
    made = made_secret(server, "none", session={"type": "realtime", "instructions": "Be brief."})
    assert made.value.startswith("ek_")
    with calling(server, made.value) as caller:
        assert caller.heard[0].session.instructions == "Be brief."
    with calling(server, made.value[:-4] + "AAAA") as caller:  # no key is needed
        assert caller.heard[0].session.instructions == ""
