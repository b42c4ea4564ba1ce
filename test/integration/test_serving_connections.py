"""Connections of a server: clients that read slowly or not at all, TLS, other names and pages."""

import asyncio
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from qwen3_omni_neuron.serving.edge.gate import Sites
from qwen3_omni_neuron.serving.edge.protocol import (
    CROWDED_KEEP_ALIVE_S,
    KEEP_ALIVE_S,
    STEP_BYTES,
    GuardedSocket,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing import raw_http
from testing.http_client import Answer, HttpClient, ask
from testing.http_server import has_ended, made_certificate, serving, url_of, wait_until
from testing.raw_http import rest_of
from testing.repeats import again
from testing.scripted_model import ScriptedModel

BIG = bytes(range(256)) * (1 << 14)  # 4 MiB
SECONDS = 20
READ_BYTES = 1 << 14


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
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


def body_of(sock: socket.socket, pause_s: float = 0.0) -> bytes:
    """Return what comes after the headers until the connection ends."""
    return rest_of(sock, pause_s, READ_BYTES).partition(b"\r\n\r\n")[2]


def connections(server: Server) -> int:
    return len(server._uvicorn.server_state.connections)


# Clients that read slowly, or have stopped.


@pytest.mark.parametrize("tls", [False, True])
def test_who_reads_slowly_without_a_pause_gets_all(
    certificate: tuple[Path, Path], tls: bool
) -> None:
    with scripted(certificate if tls else None, send_timeout_s=2.0) as server:
        with connected(server, tls) as sock:
            begin(sock)
            start_s = time.monotonic()
            assert body_of(sock, pause_s=0.015) == BIG
        assert time.monotonic() - start_s > 3  # more than one that has stopped would have


@pytest.mark.parametrize("tls", [False, True])
def test_who_has_stopped_reading_is_cut_also_after_the_answer_has_ended(
    certificate: tuple[Path, Path], tls: bool
) -> None:
    files = certificate if tls else None
    with scripted(files, send_timeout_s=1.0) as server, connected(server, tls) as sock:
        begin(sock)
        sock.recv(1000)
        wait_until(lambda: server._gate.running == 1)
        wait_until(lambda: not server._gate.running and not connections(server))
        with connected(server, tls) as other:
            begin(other)
            read = 0
            while server._gate.running or read < len(BIG) // 2:
                read += len(other.recv(1 << 14))
            assert read < len(BIG)
            wait_until(lambda: not connections(server))


def test_an_answer_is_in_progress_until_its_client_has_taken_it() -> None:
    with scripted() as server:
        with connected(server) as sock:
            begin(sock)
            sock.recv(1000)
            time.sleep(0.3)
            assert server._gate.running == 1
        wait_until(lambda: not server._gate.running and not connections(server))


def test_who_takes_a_little_now_and_then_has_the_time_of_a_request() -> None:
    """Also for what the connection's buffer holds when that is over."""
    with scripted(request_timeout_s=1.0, send_timeout_s=4.0) as server, connected(server) as sock:
        begin(sock)
        ended = threading.Event()

        def take() -> None:
            with suppress(OSError):
                while not ended.is_set() and sock.recv(500):
                    time.sleep(0.1)

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: server._gate.running == 1)
        wait_until(lambda: not server._gate.running)
        wait_until(lambda: not connections(server))
        ended.set()
        thread.join(SECONDS)


@pytest.mark.parametrize("tls", [again(False), True])
def test_a_server_that_ends_waits_until_its_answers_were_taken(
    certificate: tuple[Path, Path], tls: bool
) -> None:
    with scripted(certificate if tls else None) as server, connected(server, tls) as sock:
        begin(sock, connection="keep-alive")
        data = sock.recv(1)
        server.stop()
        while len(data) < len(BIG) - (1 << 17):  # the system holds the rest
            data += sock.recv(1 << 14)
        time.sleep(2)
        assert not server._uvicorn.should_exit
        data += rest_of(sock)
        assert data.partition(b"\r\n\r\n")[2] == BIG


def test_a_server_that_ends_waits_no_longer_than_it_may() -> None:
    with ExitStack() as stack:
        with scripted(drain_timeout_s=1.0) as server:
            sock = stack.enter_context(connected(server))
            begin(sock)
            wait_until(lambda: server._gate.running == 1)
        assert len(body_of(sock)) < len(BIG)


def test_an_idle_connection_is_kept_for_longer_than_clients_keep_it() -> None:
    """The server must not close it in the moment in which its client sends the next request."""
    with scripted(max_connections=2) as server, ExitStack() as stack:
        kept = []
        for _ in range(2):
            stack.enter_context(HttpClient(url_of(server))).ask("/health")
            open_now = server._uvicorn.server_state.connections
            kept.append([one.timeout_keep_alive for one in open_now])
    assert kept[0] == [KEEP_ALIVE_S]
    assert sorted(kept[1]) == [CROWDED_KEEP_ALIVE_S, KEEP_ALIVE_S]
    assert KEEP_ALIVE_S > 90, "Go's clients"


# Messages of a socket.

UPGRADE = (
    "GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    "connection: upgrade\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


class Sockets:
    """Stands for the realtime sockets: accepts, and does what a test wants."""

    def __init__(self, serve: Callable[[Any], Any]):
        self._serve = serve

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})

        async def send_text(text: str) -> None:
            await send({"type": "websocket.send", "text": text})

        await self._serve(send_text)


def frames_of(sock: socket.socket, pause_s: float = 0.0) -> list[Frame]:
    protocol = ClientProtocol(parse_uri("ws://localhost/"), max_size=None)
    protocol.state = protocol.state.OPEN
    sock.sendall((UPGRADE + "\r\n").encode())
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    protocol.reader.feed_data(b"")
    protocol.parser = protocol.parse()
    next(protocol.parser)
    with suppress(OSError):
        while part := sock.recv(1 << 14):
            protocol.receive_data(part)
            time.sleep(pause_s)
    return [event for event in protocol.events_received() if isinstance(event, Frame)]


def texts_of(frames: list[Frame]) -> list[str]:
    """Return the messages that frames make."""
    texts, parts = list[str](), list[bytes]()
    for frame in frames:
        if frame.opcode in (Opcode.TEXT, Opcode.CONT):
            assert (frame.opcode is Opcode.CONT) == bool(parts)
            parts.append(bytes(frame.data))
            if frame.fin:
                texts.append(b"".join(parts).decode())
                parts = []
    assert not parts
    return texts


LONG_TEXT = "a, ä, 語. " * 300_000


@pytest.mark.parametrize("tls", [False, again(True)])
def test_a_large_message_reaches_who_reads_slowly_without_a_pause(
    certificate: tuple[Path, Path], tls: bool
) -> None:
    async def serve(send: Any) -> None:
        for text in ("first", LONG_TEXT, "last"):
            await send(text)

    files = certificate if tls else None
    with scripted(files, send_timeout_s=2.0) as server, connected(server, tls) as sock:
        server._gate._sockets = Sockets(serve)  # type: ignore[assignment]
        start_s = time.monotonic()
        assert texts_of(frames_of(sock, pause_s=0.02)) == ["first", LONG_TEXT, "last"]
        assert time.monotonic() - start_s > 3


def test_a_large_message_is_whole_where_its_sender_was_cancelled() -> None:
    async def serve(send: Any) -> None:
        large = asyncio.create_task(send(LONG_TEXT))
        await asyncio.sleep(0.2)
        assert not large.done()
        large.cancel()
        await send("last")

    with scripted() as server, connected(server) as sock:
        server._gate._sockets = Sockets(serve)  # type: ignore[assignment]
        assert texts_of(frames_of(sock, pause_s=0.005)) == [LONG_TEXT, "last"]


def test_a_socket_that_does_not_read_a_large_message_is_cut() -> None:
    async def serve(send: Any) -> None:
        await send(LONG_TEXT)

    with scripted(send_timeout_s=1.0) as server, connected(server) as sock:
        server._gate._sockets = Sockets(serve)  # type: ignore[assignment]
        sock.sendall((UPGRADE + "\r\n").encode())
        sock.recv(1000)
        wait_until(lambda: server._gate.running == 1)
        wait_until(lambda: not server._gate.running and not connections(server))


# Errors.


def answer_of(server: Server, path: str, method: str = "GET", **headers: str) -> Answer:
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(url_of(server) + path, headers=lines, method=method)


def error_of(raw: bytes) -> tuple[int, dict[str, Any], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"], head.lower()


def test_an_error_that_nobody_expects_is_openais_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted() as server:
        answer = answer_of(server, "/fails")
    assert answer.status == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert vars(record)["request_id"] == answer.headers["x-request-id"]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("signals", [1, 2])
def test_a_request_that_a_server_ends_before_its_answer_is_told_so(signals: int) -> None:
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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/none", 404), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/x", 404)],
)
def test_what_no_endpoint_has_is_refused_in_openais_shape(
    method: str, path: str, status: int
) -> None:
    with scripted() as server:
        answer = answer_of(server, path, method)
    assert answer.status == status
    assert answer.headers["x-request-id"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


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


def test_head_of_what_has_no_get_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with scripted() as server, caplog.at_level("INFO", "qwen3_omni_neuron.serving"):
        assert answer_of(server, "/v1/chat/completions", "HEAD").status == 405
        wait_until(lambda: any(r.getMessage() == "request" for r in caplog.records))
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert line["reason"].startswith("HEAD /v1/chat/completions: ")


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/embeddings", "no embeddings"),
        ("POST", "/v1/images/generations", "draws none"),
        ("POST", "/v1/live/sessions", "WebSocket /v1/realtime"),
        ("POST", "/v1/realtime/calls", "no WebRTC"),
        ("POST", "/v1/messages", "OpenAI-compatible provider"),
        ("GET", "/api/tags", "OpenAI-compatible provider"),
        ("POST", "/chat/completions", "ends with /v1 here"),
        ("POST", "/v1/v1/chat/completions", "one /v1"),
        ("POST", "/v1/embeddingsx", "Served are /v1/chat/completions, /v1/responses"),
        ("POST", "/v1/chat/completion", "Did you mean /v1/chat/completions? Served are"),
    ],
)
def test_a_path_that_clients_know_is_refused_with_what_serves_it(
    method: str, path: str, said: str
) -> None:
    with scripted() as server:
        answer = answer_of(server, path, method)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (404, "unknown_url")
    assert said in error["message"], error


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: \x00\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: localhost\r\n\r\n",
        UPGRADE.replace("version: 13", "version: 7").encode() + b"\r\n",
        UPGRADE.replace("-key", "-kez").encode() + b"\r\n",
        UPGRADE.replace("/v1/realtime", "/v1/realtime?\xff").encode("latin-1") + b"\r\n",
        UPGRADE.encode() + b"x: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_in_openais_shape(raw: bytes) -> None:
    with scripted() as server:
        with connected(server) as sock:
            sock.sendall(raw)
            status, error, head = error_of(rest_of(sock))
        assert status in (400, 426, 431)
        assert error["type"] == "invalid_request_error"
        assert b"\r\nx-request-id: req_" in head
        wait_until(lambda: not connections(server))


# Requests that ask for another protocol.

H2C = {"connection": "Upgrade, HTTP2-Settings", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
H2C["upgrade"] = "h2c"


@pytest.mark.parametrize(
    "more",
    [H2C, {"connection": "upgrade, close", "upgrade": "h2c"}, {**H2C, "upgrade": "TLS/1.0, x"}],
    ids=["h2c", "close", "others"],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [1, 1 << 16])
@pytest.mark.pairs
def test_another_protocol_than_websocket_is_ignored(
    more: dict[str, str], chunked: bool, piece: int
) -> None:
    """The request has its body, and the connection its further requests, however they arrive."""
    body = json.dumps(raw_http.ASKED).encode()
    head = raw_http.head_of(None if chunked else len(body), headers=more)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    data, times = head + sent, 1 if "close" in more["connection"] else 2
    with scripted() as server:
        with connected(server) as sock:
            for at in range(0, len(data) * times, piece):
                sock.sendall((data * times)[at : at + piece])
            if times == 2:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = rest_of(sock)
        assert answer.count(b"HTTP/1.1 200 OK") == 1 + (times == 2) * 2
        assert answer.count(b'"content":"hello"') == times


def test_a_proxy_is_not_asked_for_and_headers_stay_limited() -> None:
    most = {**H2C, **{f"x-{number}": "y" for number in range(100)}}
    for raw in (
        b"CONNECT here:80 HTTP/1.1\r\nhost: here:80\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        raw_http.head_of(3, headers=most) + b"abc",
    ):
        with scripted() as server, connected(server) as sock:
            sock.sendall(raw)
            status, error, _ = error_of(rest_of(sock))
            assert (status, error["code"]) == (400, "invalid_http")


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
def test_a_page_whose_name_was_made_to_mean_this_machine_is_refused(method: str, path: str) -> None:
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
def test_a_page_of_another_host_may_use_no_endpoint(keys: tuple[str, ...]) -> None:
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
def test_a_browser_is_told_what_a_page_that_is_allowed_may_send(keys: tuple[str, ...]) -> None:
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


def test_silent_connections_to_a_tls_server_end_and_hold_up_nobody(
    certificate: tuple[Path, Path],
) -> None:
    limits = {"max_connections": 20, "header_timeout_s": 1.0}
    with scripted(certificate, **limits) as server, ExitStack() as stack:
        acceptor: Any = server._uvicorn.servers[0]
        silent = [stack.enter_context(raw_http.connected(url_of(server))) for _ in range(300)]
        assert acceptor.open <= 20
        wait_until(lambda: all(map(has_ended, silent)), SECONDS)
        wait_until(lambda: not acceptor.open)
        with connected(server, tls=True) as sock:
            begin(sock, "/health")
            assert b"ok" in body_of(sock)
        # A handshake that was made, and no headers after it.
        with connected(server, tls=True) as sock:
            assert sock.recv(1) == b""


def test_a_socket_that_takes_long_to_read_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop and the interpreter lock are its own for a quarter of the time at most."""
    now_s, later = [0.0], list[float]()

    def parse(self: WebSocketsSansIOProtocol, data: bytes) -> None:
        now_s[0] += len(data) * (1e-6 if data[0] else 1e-9)

    socket = object.__new__(GuardedSocket)
    socket.loop = SimpleNamespace(  # type: ignore[assignment]
        time=lambda: now_s[0], call_later=lambda delay_s, _: later.append(delay_s)
    )
    socket.transport = SimpleNamespace(pause_reading=lambda: None)  # type: ignore[assignment]
    socket._refused = socket.disconnected = False
    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", parse)
    for first in (b"\1", b"\0"):
        socket._unread = bytearray(first * (STEP_BYTES + 1))
        socket._read_step()
    assert later == [pytest.approx(3 * STEP_BYTES * 1e-6), 0]


def test_a_burst_of_messages_leaves_others_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each message takes 2 ms here. After three of them the socket pauses for as long."""
    now, paused = [0.0], []

    async def sleep(seconds: float) -> None:
        paused.append(round(seconds, 4))
        now[0] += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    socket = object.__new__(GuardedSocket)
    socket.loop = SimpleNamespace(time=lambda: now[0])  # type: ignore[assignment]
    socket._account = SimpleNamespace(release=lambda count: None)  # type: ignore[assignment]
    socket._taken, socket._unread, socket._burst_from_s = 0, bytearray(), math.inf
    socket.queue, socket.read_paused = asyncio.Queue(), False
    for _ in range(7):
        socket.queue.put_nowait({"type": "websocket.receive"})  # type: ignore[arg-type]

    async def take() -> None:
        for _ in range(7):
            await socket.receive()
            now[0] += 0.002

    asyncio.run(take())
    assert paused == [0, 0, 0, 0.006, 0, 0, 0.006]
