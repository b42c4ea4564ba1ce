"""Connections of a server: clients that read slowly or not at all, TLS, other names and pages."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from qwen3_omni_neuron.serving.edge.gate import Sites
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.server import KEEP_ALIVE_S, Server
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing import raw_http
from testing.http_client import Answer, ask
from testing.http_server import made_certificate, serving, url_of, wait_until
from testing.raw_http import UPGRADE, rest_of
from testing.scripted_model import ScriptedModel

BIG = bytes(range(256)) * (1 << 14)  # 4 MiB
SECONDS = 20
READ_BYTES = 1 << 14


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    return made_certificate(tmp_path_factory.mktemp("certificate"))


@contextmanager
def scripted(tls: tuple[Path, Path] | None = None, **settings: Any) -> Iterator[Server]:
    """Serve a model with large answers at /big, errors at /fails, and none at /sleeps."""
    if tls is not None:
        settings |= {"tls_cert": tls[0], "tls_key": tls[1]}
    model: Any = ScriptedModel(["hello"])
    with serving(model, **settings) as server:
        app: Any = server._gate._app

        async def big() -> Response:
            return Response(BIG)

        async def fails() -> None:
            raise ZeroDivisionError("as no handler expects it")

        async def sleeps() -> None:
            await asyncio.sleep(900)

        app.add_api_route("/sleeps", sleeps)
        app.add_api_route("/big", big)
        app.add_api_route("/fails", fails)
        yield server


def connected(server: Server, tls: bool = False) -> socket.socket:
    """A connection with small buffers."""
    url = url_of(server, "https" if tls else "http")
    return raw_http.connected(url, SECONDS, buffer_bytes=READ_BYTES)


def begin(sock: socket.socket, path: str = "/big", connection: str = "close") -> None:
    lines = f"GET {path} HTTP/1.1", "host: localhost", f"connection: {connection}", "", ""
    sock.sendall("\r\n".join(lines).encode())


@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_is_in_progress_and_counts_until_its_client_has_taken_it(
    certificate, tls
) -> None:
    with scripted(certificate if tls else None) as server:
        with connected(server, tls) as sock:
            begin(sock)
            data = sock.recv(1000)
            time.sleep(0.3)
            assert server._gate.running == 1
            assert server.service.held.taken == len(BIG)
            data += rest_of(sock)
            assert data.partition(b"\r\n\r\n")[2] == BIG
        wait_until(lambda: not server._gate.running and not server.service.held.taken)


def test_answers_without_work_of_the_model_are_refused_beyond_the_bytes_of_all() -> None:
    with scripted(max_held_bytes=len(BIG) + 1) as server, connected(server) as sock:
        begin(sock)
        sock.recv(1000)
        refused = answer_of(server, "/big")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_bytes")


def test_a_server_that_ends_waits_until_its_answers_were_taken_or_its_time_is_over() -> None:
    for drain_timeout_s, whole in ((60.0, True), (1.0, False)):
        with scripted(drain_timeout_s=drain_timeout_s) as server, connected(server) as sock:
            begin(sock, connection="keep-alive")
            data = sock.recv(1)
            server.stop()
            time.sleep(0.2 if whole else 3.5)
            data += rest_of(sock)
            assert (data.partition(b"\r\n\r\n")[2] == BIG) == whole


def test_an_idle_connection_is_kept_for_longer_than_clients_keep_it() -> None:
    """The server must not close it in the moment in which its client sends the next request."""
    assert KEEP_ALIVE_S > 90, "Go's clients"


def answer_of(server: Server, path: str, method: str = "GET", **headers: str) -> Answer:
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(url_of(server) + path, headers=lines, method=method)


def error_of(raw: bytes) -> tuple[int, dict[str, Any], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"], head.lower()


def test_an_error_that_nobody_expects_is_openais_and_logged_once(caplog) -> None:
    with scripted() as server:
        answer = answer_of(server, "/fails")
    assert answer.status == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert vars(record)["request_id"] == answer.headers["x-request-id"]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_a_server_that_gets_no_more_threads_is_busy(monkeypatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    long = {**raw_http.ASKED, "messages": [{"role": "user", "content": "Hello " * 20_000}]}
    with scripted() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        refused = ask(url_of(server) + raw_http.CHAT, long)
        monkeypatch.undo()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert ask(url_of(server) + raw_http.CHAT, raw_http.ASKED).status == 200


def test_a_request_whose_client_leaves_before_it_is_read_is_not_done() -> None:
    """The event loop is busy while twenty clients come, ask and leave."""
    busy, left, done = threading.Event(), threading.Event(), list[int]()

    async def blocks() -> None:
        busy.set()
        assert left.wait(SECONDS)

    async def does() -> None:
        done.append(1)

    with scripted() as server:
        app: Any = server._gate._app
        app.add_api_route("/blocks", blocks)
        app.add_api_route("/does", does)
        with connected(server) as sock:
            begin(sock, "/blocks")
            assert busy.wait(SECONDS)
            for _ in range(20):
                with connected(server) as leaving:
                    begin(leaving, "/does")
            left.set()
            rest_of(sock)
        assert answer_of(server, "/does").status == 200
    assert done == [1]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_request_that_a_server_ends_before_its_answer_is_told_so(signals) -> None:
    with ExitStack() as stack:
        with scripted(drain_timeout_s=0.5 if signals == 1 else 900.0) as server:
            sock = stack.enter_context(connected(server))
            begin(sock, "/sleeps")
            wait_until(lambda: server._gate.running == 1)
            for _ in range(signals):
                server.stop()
        status, error, head = error_of(rest_of(sock))
    assert (status, error["code"]) == (503, "cancelled")
    assert b"retry-after" in head


def test_head_has_the_status_and_headers_of_get_and_no_body() -> None:
    with scripted() as server:
        for path in ("/", "/page/main.js", "/health", "/v1/models", "/big", "/openapi.json"):
            with connected(server) as sock:
                got = answer_of(server, path)
                lines = f"HEAD {path} HTTP/1.1", "host: localhost", "connection: close", "", ""
                sock.sendall("\r\n".join(lines).encode())
                head, end, body = rest_of(sock).partition(b"\r\n\r\n")
            status, *headers = head.decode().lower().split("\r\n")
            assert (status.split()[1], end, body) == ("200", b"\r\n\r\n", b""), path
            assert got.status == 200
            assert f"content-length: {len(got.body)}" in headers, path
            assert got.headers.get("content-type", "") in head.decode(), path


def test_a_path_that_clients_know_is_refused_with_what_serves_it() -> None:
    for method, path, said in (
        ("POST", "/v1/embeddings", "no embeddings"),
        ("POST", "/v1/images/generations", "can't draw"),
        ("POST", "/v1/live/sessions", "WebSocket /v1/realtime"),
        ("POST", "/v1/realtime/calls", "no WebRTC"),
        ("POST", "/v1/messages", "OpenAI-compatible provider"),
        ("GET", "/api/tags", "OpenAI-compatible provider"),
        ("POST", "/chat/completions", "ends with /v1 here"),
        ("POST", "/v1/v1/chat/completions", "one /v1"),
        ("POST", "/v1/embeddingsx", "This server has /v1/chat/completions, /v1/responses"),
        ("POST", "/v1/chat/completion", "Did you mean /v1/chat/completions? This server has"),
    ):
        with scripted() as server:
            answer = answer_of(server, path, method)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (404, "unknown_url")
        assert said in error["message"], error


def test_a_length_of_thousands_of_digits_is_read_or_refused() -> None:
    body = json.dumps(raw_http.ASKED).encode()
    head = raw_http.head_of(len(body), headers={"connection": "close"})
    for length, wanted in ((b"%05001d" % len(body), 200), (b"9" * 5001, 400)):
        with scripted() as server, connected(server) as sock:
            sock.sendall(head.replace(b"h: %d" % len(body), b"h: " + length) + body)
            assert raw_http.status_of(rest_of(sock)) == wanted


# Names of the server, pages of others, and keys.

PAGE = {"host": "evil.example", "origin": "http://evil.example", "content_type": "text/plain"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/metrics")],
)
def test_a_page_whose_name_was_made_to_mean_this_machine_is_refused(method, path) -> None:
    with scripted() as server:
        answer = answer_of(server, path, method, **PAGE)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "--allow-host" in answer.json()["error"]["message"]
        for probe in ("/health", "/ready"):
            assert answer_of(server, probe, host="any.name", origin="null").status == 200


def test_a_server_without_keys_is_asked_under_names_that_it_knows() -> None:
    def refused(settings: ServerSettings, *headers: tuple[bytes, bytes]) -> str | None:
        try:
            Sites(settings).check(headers)
        except ApiError as error:
            assert error.status == 403
            return error.code
        return None

    plain = ServerSettings(host="box", allowed_hosts=("Gpu.example",))
    known = ["127.0.0.1:8000", "192.0.2.7", "[::1]:8000", "LOCALHOST:1", "localhost.", "box:80"]
    for host in [*known, "gpu.example", "GPU.EXAMPLE:443"]:
        assert refused(plain, (b"host", host.encode())) is None, host
    others = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a:b:c"]
    for host in [*others, "gpu.example.evil.example", "localhost,evil.example", "\xff"]:
        assert refused(plain, (b"host", host.encode("latin-1"))) == "host_not_allowed", host
    assert refused(plain) is None  # as HTTP/1.0 has it, and no browser
    two = (b"host", b"localhost"), (b"host", b"evil.example")
    assert refused(plain, *two) == "host_not_allowed"
    keyed = ServerSettings(api_keys=("key",), allowed_origins=("https://a.example",))
    for host, origin, wanted in (
        ("any.example", "https://any.example", None),
        ("any.example:81", "http://ANY.example:81", None),
        ("any.example", "https://a.example", None),
        ("any.example", "https://b.example", "origin_not_allowed"),
        ("any.example:81", "http://any.example", "origin_not_allowed"),
        ("any.example", "null", "origin_not_allowed"),
        ("", "null", "origin_not_allowed"),
        ("any.example", "http://[", "origin_not_allowed"),
    ):
        headers = (b"host", host.encode()), (b"origin", origin.encode())
        assert refused(keyed, *headers) == wanted, (host, origin)
    assert refused(keyed, (b"origin", b"null")) == "origin_not_allowed"


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_a_page_of_another_host_may_use_no_endpoint(keys) -> None:
    with scripted(api_keys=keys, allowed_origins=("https://a.example",)) as server:
        own = f"http://127.0.0.1:{server.port}"
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
            for origin in ("http://evil.example", "null", f"http://localhost:{server.port}"):
                answer = answer_of(server, path, method, origin=origin)
                code = answer.json()["error"]["code"]
                assert (answer.status, code) == (403, "origin_not_allowed")
                assert "access-control-allow-origin" not in answer.headers
            for origin in (own, "https://a.example"):
                answer = answer_of(server, path, method, origin=origin, authorization="Bearer key")
                assert answer.status == (400 if method == "POST" else 200)
                readable = answer.headers.get("access-control-allow-origin")
                assert readable == (None if origin == own else origin)


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_a_browser_is_told_what_a_page_that_is_allowed_may_send(keys) -> None:
    """Before its request, and without its key, as browsers ask."""
    wanted = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type,x-stainless-os",
    }
    with scripted(api_keys=keys, allowed_origins=("https://a.example",)) as server:
        chat = "/v1/chat/completions"
        told = answer_of(server, chat, "OPTIONS", origin="https://a.example", **wanted)
        assert (told.status, told.body) == (204, b"")
        assert told.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in told.headers["access-control-allow-methods"]
        names = told.headers["access-control-allow-headers"]
        assert names == wanted["access_control_request_headers"]
        other = answer_of(server, chat, "OPTIONS", origin="https://b.example", **wanted)
        assert other.status == 403 and "access-control-allow-origin" not in other.headers
        plain = answer_of(server, chat, "OPTIONS", origin="https://a.example")
        assert plain.status == (401 if keys else 405)
        assert plain.headers["access-control-allow-origin"] == "https://a.example"


def test_a_key_beyond_ascii_opens_the_server() -> None:
    key = "schlüssel-鍵"
    with scripted(api_keys=(key, "other")) as server:
        for given, status in ((key.encode(), 200), (key.encode()[:-1], 401), (b"\xff", 401)):
            with connected(server) as sock:
                head = b"GET /v1/models HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
                sock.sendall(head + b"authorization: Bearer " + given + b"\r\n\r\n")
                assert int(sock.recv(100).split()[1]) == status
            with connected(server) as sock:
                sock.sendall(UPGRADE.encode() + b"authorization: Bearer " + given + b"\r\n\r\n")
                assert int(sock.recv(100).split()[1]) == (101 if status == 200 else 401)
        for first, second in ((key, "other"), ("wrong", key), (key, key)):
            with connected(server) as sock:
                lines = b"".join(
                    b"authorization: Bearer %s\r\n" % k.encode() for k in (first, second)
                )
                sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n" + lines + b"\r\n")
                assert b" 400 " in sock.recv(100)
