"""Clients that the server must bear: they send too much, too slowly, or go away."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from qwen3_omni_neuron.serving.server import Server
from testing.http_client import HttpClient
from testing.http_server import client_of, serving, url_of, wait_until
from testing.raw_http import ASKED, LONG, connected, head_of, rest_of, status_of, still_answers


@pytest.fixture(scope="module")
def server(omni) -> Iterator[Server]:
    limits = {"header_timeout_s": 1.0, "body_timeout_s": 1.0}
    with serving(omni, **limits, max_body_bytes=400_000) as running:
        yield running


def test_a_body_that_is_too_large_is_refused(server) -> None:
    with client_of(server) as client:
        large: Any = {**ASKED, "messages": [{"role": "user", "content": "x" * 500_000}]}
        with pytest.raises(openai.APIStatusError, match="more than 400000 bytes") as refused:
            client.chat.completions.create(**large)
        assert refused.value.status_code == 413
    wait_until(lambda: server.service.held.taken == 0)


def test_a_body_that_never_ends_is_cut_in_bounded_memory(server) -> None:
    most = 0
    with connected(url_of(server)) as sock:
        sock.sendall(head_of(None))
        part = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        try:
            for _ in range(2000):  # 64 MB
                sock.sendall(part)
                most = max(most, server.service.held.taken)
        except OSError:
            pass
        assert status_of(rest_of(sock)) in (0, 413)
    assert most <= 3 * 2 * 400_000
    wait_until(lambda: server.service.held.taken == 0)
    still_answers(url_of(server))


def test_bodies_together_are_bounded(omni) -> None:
    with serving(omni, max_held_bytes=300_000) as server:
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(200_000) + b"x" * 90_000)
            wait_until(lambda: server.service.held.taken == 270_000)
            with client_of(server) as client, pytest.raises(openai.InternalServerError) as refused:
                more: Any = {**ASKED, "messages": [{"role": "user", "content": "x" * 20_000}]}
                client.chat.completions.create(**more)
            assert refused.value.status_code == 503
            still_answers(url_of(server))
        wait_until(lambda: server.service.held.taken == 0)


def test_a_body_that_comes_too_slowly_is_a_408(server) -> None:
    with connected(url_of(server)) as sock:
        sock.sendall(head_of(100) + b"{")
        answer = rest_of(sock)
    assert status_of(answer) == 408
    assert b"body_timeout" in answer


def test_connections_that_send_a_byte_at_a_time_are_cut_and_hurt_nobody(server) -> None:
    request = head_of(2)
    with client_of(server) as client:
        socks = [connected(url_of(server)) for _ in range(200)]
        ended = 0
        start_s = time.monotonic()
        for byte in request:
            for sock in socks:
                try:
                    sock.send(bytes([byte]))
                except OSError:
                    ended += 1
            client.chat.completions.create(**ASKED)
            time.sleep(0.02)
            if ended or time.monotonic() - start_s > 5:
                break
        for sock in socks:
            sock.close()
    assert ended


def test_a_client_that_reads_nothing_holds_up_itself_alone_until_its_time_is_over(omni) -> None:
    with serving(omni, request_timeout_s=8.0) as server:
        body = json.dumps({**LONG, "wait_timeout_s": 60}).encode()
        with connected(url_of(server), buffer_bytes=4096) as sock:
            sock.sendall(head_of(len(body)) + body)
            wait_until(lambda: omni.status().running == 1)
            for _ in range(3):
                still_answers(url_of(server))
            wait_until(lambda: omni.status().running == 0, 60)
        wait_until(lambda: not server.service.held.taken)


def test_clients_that_vanish_leave_nothing(omni, server) -> None:
    body = json.dumps(LONG).encode()
    for wait_s in (0.0, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        with connected(url_of(server)) as sock:
            sock.sendall(head_of(len(body)) + body[: None if wait_s else -5])
            time.sleep(wait_s)
    wait_until(lambda: omni.status().running == 0 and omni.status().queued == 0)
    wait_until(lambda: server._gate.running == 0)
    assert server.service.held.taken == 0
    still_answers(url_of(server))


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_takes_too_long_ends(omni) -> None:
    with serving(omni, request_timeout_s=0.3) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError) as late:
            client.post("/chat/completions", body={**LONG, "stream": False}, cast_to=object)
        assert late.value.status_code == 504
        wait_until(lambda: omni.status().running == 0)


STREAMS: dict[str, dict[str, Any]] = {
    "chat/completions": LONG,
    "completions": {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True},
    "responses": {"input": "Hello", "ignore_eos": True, "stream": True},
}


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("end", ["request_timeout", "drained", "ended"])
def test_a_stream_that_a_server_ends_early_says_so_in_its_last_event(omni, path, end) -> None:
    limits = {"request_timeout_s": 0.3} if end == "request_timeout" else {}
    with serving(omni, **limits, drain_timeout_s=0.1 if end == "drained" else 300.0) as server:
        with HttpClient(f"{url_of(server)}/v1/{path}") as client:
            answer = client.begin("", STREAMS[path])
            for _ in range({"drained": 1, "ended": 2}.get(end, 0)):
                server.stop()
            *_, last, rest = answer.read().split(b"\n\n")
        wait_until(lambda: omni.status().running == 0)
    event = json.loads(last.partition(b"data: ")[2])
    code = "request_timeout" if end == "request_timeout" else "cancelled"
    if path == "responses":
        error = event["response"]["error"]
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        assert (error["code"], error["type"]) == ("server_error", code)
        assert {item["status"] for item in event["response"]["output"]} == {"incomplete"}
    else:
        assert (event["error"]["type"], event["error"]["code"]) == ("server_error", code)
    assert (answer.status, rest) == (200, b"")
