"""Clients that the server must bear: they send too much, too slowly, wrongly, or go away."""

import asyncio
import base64
import io
import json
import logging
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import soundfile
from openai import OpenAI

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.events import Status
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.sound import wav_header
from testing.http_server import client_of, made_certificate, serving, url_of, wait_until
from testing.media_cases import QUESTION_WAV
from testing.scripted_model import ScriptedModel

MODEL = "qwen3-omni"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
LONG: dict[str, Any] = {
    **{"model": MODEL, "messages": HELLO, "stream": True, "modalities": ["text", "audio"]},
    # No token ends the text, and the seed's speech has 1764 frames: more than wait for a client.
    **{"audio": {"format": "pcm16"}, "thinker_eos_token_id": 10**6, "seed": 12},
    **{"thinker_max_new_tokens": 3000, "talker_max_new_tokens": 4000},
}
SECONDS = 10
STAGES = ("thinker", "talker", "vocoder")


@contextmanager
def connected(server: Server, **options: int) -> Iterator[socket.socket]:
    with closing(socket.socket()) as sock:
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(SECONDS)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def head(length: int | None, path: str = "/v1/chat/completions") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{size}\r\n\r\n".encode()


def answer_of(sock: socket.socket) -> bytes:
    """Everything that comes until the connection ends, or nothing more does."""
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except OSError:
        pass
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def assert_cut_while_it_sends(sock: socket.socket, data: bytes) -> None:
    """Send some bytes again and again, and assert that the connection ends in time."""
    start_s = time.monotonic()
    with suppress(OSError):
        while time.monotonic() - start_s < SECONDS:
            sock.sendall(data)
            time.sleep(0.05)
    assert time.monotonic() - start_s < SECONDS / 2


@pytest.fixture(scope="module")
def server(omni: Qwen3Omni) -> Iterator[Server]:
    limits = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "max_connections": 250}
    sizes = {"max_body_bytes": 400_000, "max_media_bytes": 200_000, "max_media": 3}
    media = {"max_media_s": 20.0, "max_pixels": 500_000}
    with serving(omni, **limits, **sizes, **media) as running:
        yield running


def still_answers(server: Server) -> None:
    with client_of(server) as client:
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"


def test_a_key_is_needed_where_there_are_keys(omni: Qwen3Omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        for key in ("one", "two"):
            with client_of(server, key) as client:
                client.chat.completions.create(**ASKED)
        with client_of(server, "three") as client:
            for ask in (
                lambda: client.chat.completions.create(**ASKED),
                client.models.list,
                lambda: client._client.get(f"{url_of(server)}/metrics").raise_for_status(),
            ):
                with pytest.raises(Exception, match="401"):
                    ask()
            assert client._client.get(f"{url_of(server)}/ready").status_code == 200
        # Without a key not even the body is read.
        with connected(server) as sock:
            sock.sendall(head(300_000))
            assert status_of(sock.recv(1000)) == 401


def test_another_key_can_not_name_a_spoken_reply(omni: Qwen3Omni) -> None:
    with serving(omni, api_keys=("one", "two")) as server:
        spoken: Any = {**ASKED, "modalities": ["audio"], "audio": {"format": "wav"}}
        spoken["extra_body"] = {"talker_max_new_tokens": 3}
        with client_of(server, "one") as one, client_of(server, "two") as two:
            audio = one.chat.completions.create(**spoken).choices[0].message.audio
            assert audio is not None
            turns: Any = [*HELLO, {"role": "assistant", "audio": {"id": audio.id}}, *HELLO]
            one.chat.completions.create(**{**ASKED, "messages": turns})
            with pytest.raises(openai.BadRequestError, match="never was"):
                two.chat.completions.create(**{**ASKED, "messages": turns})


def test_rows_are_shared_within_a_key_alone(omni: Qwen3Omni) -> None:
    words: Any = {**ASKED, "messages": [{"role": "user", "content": "only this test asks so"}]}

    def cached(server: Server, key: str) -> int:
        with client_of(server, key) as client:
            usage = client.chat.completions.create(**words).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    with serving(omni, api_keys=("uno", "due")) as server:
        assert cached(server, "uno") == 0
        assert cached(server, "uno") > 10
        assert cached(server, "due") == 0


def test_a_caller_who_asks_too_often_is_told_when_to_come_back(omni: Qwen3Omni) -> None:
    with serving(omni, requests_per_minute=2) as server, client_of(server) as client:
        for _ in range(2):
            client.chat.completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ASKED)
        assert 25 <= int(refused.value.response.headers["retry-after"]) <= 31


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
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
        still_answers(server)


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    with client_of(server) as client:
        large: Any = {**ASKED, "messages": [{"role": "user", "content": "x" * 500_000}]}
        with pytest.raises(openai.APIStatusError, match="more than 400000 bytes") as refused:
            client.chat.completions.create(**large)
        assert refused.value.status_code == 413
    wait_until(lambda: server.service.held.taken == 0)


def test_a_body_that_never_ends_is_cut_in_bounded_memory(server: Server) -> None:
    most = 0
    with connected(server) as sock:
        sock.sendall(head(None))
        part = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        try:
            for _ in range(2000):  # 64 MB
                sock.sendall(part)
                most = max(most, server.service.held.taken)
        except OSError:
            pass
        assert status_of(answer_of(sock)) in (0, 413)
    assert most <= 3 * 2 * 400_000
    wait_until(lambda: server.service.held.taken == 0)
    still_answers(server)


@pytest.mark.parametrize("request_line", ["POST /v1/chat/completions", "GET /health"])
def test_a_body_that_drips_after_its_answer_is_cut(server: Server, request_line: str) -> None:
    """Refused by its length, or never read: the answer comes, and the connection ends."""
    with connected(server) as sock:
        lines = f"{request_line} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500000\r\n\r\n"
        sock.sendall(lines.encode())
        assert status_of(sock.recv(4096)) in (200, 413)
        assert_cut_while_it_sends(sock, b"x")


def test_bodies_together_are_bounded(omni: Qwen3Omni) -> None:
    with serving(omni, max_held_bytes=300_000) as server:
        with connected(server) as sock:
            sock.sendall(head(200_000) + b"x" * 90_000)
            wait_until(lambda: server.service.held.taken == 270_000)
            with client_of(server) as client, pytest.raises(openai.InternalServerError) as refused:
                more: Any = {**ASKED, "messages": [{"role": "user", "content": "x" * 20_000}]}
                client.chat.completions.create(**more)
            assert refused.value.status_code == 503
            still_answers(server)
        wait_until(lambda: server.service.held.taken == 0)


def test_a_body_that_comes_too_slowly_is_a_408(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(head(100) + b"{")
        answer = answer_of(sock)
    assert status_of(answer) == 408
    assert b"body_timeout" in answer


def test_connections_that_send_a_byte_at_a_time_are_cut_and_hurt_nobody(server: Server) -> None:
    request = head(2)
    with client_of(server) as client:
        socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
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
    wait_until(lambda: len(server._uvicorn.server_state.connections) <= 1)


def test_one_connection_too_many_is_refused_and_the_others_go_on(omni: Qwen3Omni) -> None:
    with serving(omni, max_connections=3) as server, client_of(server) as client:
        client.chat.completions.create(**ASKED)  # its connection stays open
        with connected(server), connected(server), connected(server) as fourth:
            answer = answer_of(fourth)
            assert status_of(answer) == 503
            assert (
                json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "too_many_connections"
            )
            client.chat.completions.create(**ASKED)


def test_ten_thousand_headers_are_refused(server: Server) -> None:
    with connected(server) as sock:
        lines = b"".join(b"x-%d: y\r\n" % number for number in range(10_000))
        with suppress(OSError):
            request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            sock.sendall(request + lines + b"\r\n")
        assert status_of(answer_of(sock)) in (0, 400, 431)  # 0: cut while it was sending
    still_answers(server)


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\na: ",
        CHUNKED + b"1;",
        CHUNKED + b"1\r\nx\r\n0\r\na: ",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /",
    ],
    ids=["address", "header", "extension of a chunk", "trailer", "address of the next request"],
)
def test_what_never_ends_is_cut_in_bounded_memory(server: Server, begun: bytes) -> None:
    sent = 0
    with connected(server) as sock:
        with suppress(OSError):
            sock.sendall(begun)
            while sent < 50_000_000:
                sock.sendall(b"x" * 10_000)
                sent += 10_000
        assert status_of(answer_of(sock)) in (0, 200, 400)
    assert sent < 10_000_000  # most of it in buffers of the system
    still_answers(server)


def test_requests_sent_before_the_answer_are_answered_in_order_or_cut(server: Server) -> None:
    request = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(server) as sock:
        for path in (b"/health", b"/ready", b"/none") * 4:
            sock.sendall(request % path)
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        found = re.findall(rb"HTTP/1.1 (\d+) ", answer_of(sock))
    assert found == [*4 * [b"200", b"200", b"404"], b"200"]
    with connected(server) as sock:
        with suppress(OSError):
            sock.sendall(10_000 * (request % b"/health"))
        assert answer_of(sock).count(b"HTTP/1.1 200") < 10_000
    still_answers(server)


def test_empty_lines_between_requests_keep_no_connection(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status_of(sock.recv(4096)) == 200
        assert_cut_while_it_sends(sock, b"\r\n")


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: localhost\r\n"
        b"connection: close\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ],
)
def test_what_is_no_request_gets_a_4xx_or_nothing(server: Server, raw: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(raw)
        answer = answer_of(sock)
    assert status_of(answer) in (0, 400, 404, 405, 501)
    assert b"root:" not in answer
    still_answers(server)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "qwen3-omni", "messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "\xff"}',
        b'{"model": 1e999999, "messages": []}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
        json.dumps({**ASKED, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({**ASKED, "temperature": float("nan")}).encode(),
        json.dumps({**ASKED, "chunk_frames": [1] * 50_000 + [-1]}).encode(),
        json.dumps({**ASKED, "a" * 50_000: 1}).encode(),
    ],
)
def test_a_body_that_makes_no_sense_is_a_4xx_in_openais_shape(server: Server, body: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(head(len(body)).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + body)
        answer = answer_of(sock)
    assert status_of(answer) == 400, answer[:300]
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert len(error["message"]) < 4000


def part_of(kind: str, content: bytes | str, media_type: str) -> dict[str, Any]:
    url = content
    if isinstance(content, bytes):
        url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels, with none of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def silence(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, [0.0] * (8000 * seconds), 8000, format="FLAC")
    return file.getvalue()


WAV = QUESTION_WAV.read_bytes()
BAD_MEDIA: list[tuple[dict[str, Any], int, str]] = [
    (part_of("audio", b"no sound at all", "audio/wav"), 400, "invalid_media"),
    (part_of("audio", b"", "audio/wav"), 400, "invalid_media"),
    (part_of("audio", WAV[:30], "audio/wav"), 400, "invalid_media"),
    (part_of("audio", wav_header(16000, 0), "audio/wav"), 400, "invalid_media"),
    (part_of("audio", silence(30), "audio/flac"), 400, "media_too_long"),
    (part_of("audio", WAV, "text/html"), 400, "invalid_media_type"),
    (part_of("audio", WAV, "image/png"), 400, "invalid_media_type"),
    (part_of("image", b"GIF89a", "image/gif"), 400, "invalid_media"),
    (part_of("image", png_of(1000, 1000), "image/png"), 400, "media_too_large"),
    (part_of("image", png_of(60_000, 60_000), "image/png"), 400, "media_too_large"),
    (part_of("image", png_of(10, 10), "image/png"), 400, "invalid_media"),
    (part_of("image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image/eps"), 400, ""),
    (part_of("image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), 400, ""),
    (part_of("video", b"#EXTM3U\n/etc/passwd\n", "video/mp2t"), 400, "invalid_media"),
    (part_of("video", b"ffconcat version 1.0\nfile /etc/passwd\n", "video/mp4"), 400, ""),
    (part_of("video", b"\0" * 1000, "video/mp4"), 400, "invalid_media"),
    (
        {"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}},
        400,
        "invalid_base64",
    ),
    ({"type": "input_audio", "input_audio": {"data": "/etc/passwd", "format": "wav"}}, 400, ""),
    ({"type": "input_audio", "input_audio": {"data": "A" * 300_000}}, 413, "media_too_large"),
    *(
        (part_of(kind, url, ""), 400, "invalid_media_url")
        for kind in ("audio", "image", "video")
        for url in (
            "/etc/passwd",
            "../../etc/passwd",
            "file:///etc/passwd",
            "http://169.254.169.254/latest/meta-data/",
            "http://localhost:1/",
            "ftp://here/a",
            "data:audio/wav,abc",
            "data:,",
            "DATA:audio/wav;base64,AAAA",
            "",
        )
    ),
    ({"type": "audio", "audio": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image", "image": "/etc/passwd"}, 400, "invalid_value"),
    ({"type": "image_url", "image_url": "data:image/png;base64,"}, 400, "invalid_value"),
    ({"type": "image_url"}, 400, "invalid_value"),
]


def test_bad_media_are_refused_each_in_its_way(server: Server) -> None:
    with client_of(server) as client:
        for part, status, code in BAD_MEDIA:
            messages = [{"role": "user", "content": [part]}]
            with pytest.raises(openai.APIStatusError) as refused:
                client.post(
                    "/chat/completions", body={**ASKED, "messages": messages}, cast_to=object
                )
            shown = str(part)[:200]
            assert refused.value.status_code == status, (shown, refused.value)
            assert not code or refused.value.code == code, (shown, refused.value)
            assert not re.search("root:| at 0x|/usr/|/home/", str(refused.value))
        four = [{"role": "user", "content": [part_of("audio", WAV[:20_044], "audio/wav")] * 4}]
        with pytest.raises(openai.BadRequestError, match="more than 3 media"):
            client.post("/chat/completions", body={**ASKED, "messages": four}, cast_to=object)
    still_answers(server)


def test_no_file_is_opened_and_no_name_looked_up_for_a_request(server: Server) -> None:
    opened: list[Any] = []
    watched = ("open", "socket.getaddrinfo", "socket.connect", "subprocess.Popen", "os.listdir")
    watching = threading.Event()

    def watch(event: str, arguments: Any) -> None:
        ours = threading.current_thread() is not threading.main_thread()  # that is the client
        if ours and watching.is_set() and event in watched:
            opened.append((event, str(arguments[:2])))

    sys.addaudithook(watch)
    urls = ("/etc/passwd", "file:///etc/passwd", "http://example.org/x", "http://169.254.169.254/")
    bodies = [
        json.dumps({**ASKED, "messages": [{"role": "user", "content": [part_of(k, url, "")]}]})
        for k in ("audio", "image", "video")
        for url in urls
    ]
    watching.set()
    for body in bodies:
        with connected(server) as sock:
            sock.sendall(head(len(body)) + body.encode())
            assert status_of(sock.recv(1 << 16)) == 400
    watching.clear()
    assert opened == []


def test_a_client_that_reads_nothing_holds_up_itself_alone_and_is_cut(omni: Qwen3Omni) -> None:
    with serving(omni, send_timeout_s=1.0) as server:
        body = json.dumps({**LONG, "wait_timeout_s": 60}).encode()
        with connected(server, SO_RCVBUF=4096) as sock:
            sock.sendall(head(len(body)) + body)
            wait_until(lambda: omni.status().running == 1)
            start_s = time.monotonic()
            for _ in range(3):
                still_answers(server)
            assert time.monotonic() - start_s < SECONDS
            wait_until(lambda: omni.status().running == 0, 60)
        labels = {"path": "/v1/chat/completions", "status": "left"}
        figures = server.service.metrics.registry
        wait_until(lambda: figures.get_sample_value("qwen3_omni_requests_total", labels) == 1)
        still_answers(server)


def test_clients_that_vanish_leave_nothing(omni: Qwen3Omni, server: Server) -> None:
    body = json.dumps(LONG).encode()
    for wait_s in (0.0, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        with connected(server) as sock:
            sock.sendall(head(len(body)) + body[: None if wait_s else -5])
            time.sleep(wait_s)
    wait_until(lambda: omni.status().running == 0 and omni.status().queued == 0)
    wait_until(lambda: server._gate.running == 0)
    assert server.service.held.taken == 0
    still_answers(server)


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_takes_too_long_ends(omni: Qwen3Omni) -> None:
    with serving(omni, request_timeout_s=0.3) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError) as late:
            client.post("/chat/completions", body={**LONG, "stream": False}, cast_to=object)
        assert late.value.status_code == 504
        wait_until(lambda: omni.status().running == 0)


def test_a_draining_server_ends_what_runs_and_takes_no_more(omni: Qwen3Omni) -> None:
    with serving(omni) as server, client_of(server) as client:
        asked: Any = {**LONG, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 60}
        extra = {k: asked.pop(k) for k in list(asked) if k.startswith(("thinker", "talker"))}
        stream = iter(client.chat.completions.create(**asked, extra_body=extra))
        next(stream)
        server.stop()
        with pytest.raises(openai.InternalServerError, match="draining") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        ready = client._client.get(f"{url_of(server)}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        pieces = list(stream)
        assert pieces[-1].choices[0].finish_reason
        wait_until(lambda: server._uvicorn.should_exit)


def test_requests_before_the_model_is_loaded_are_told_to_wait_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from qwen3_omni_neuron.serving import server as server_module
    from qwen3_omni_neuron.serving.settings import ServerSettings

    monkeypatch.setattr(server_module, "PROGRESS_S", 0.1)
    monkeypatch.setattr(logs.logger, "level", logging.INFO)
    caplog.set_level(logging.INFO)

    def loading() -> list[dict[str, Any]]:
        return [vars(record) for record in caplog.records if record.getMessage() == "loading"]

    go = threading.Event()

    def load() -> Any:
        go.wait(SECONDS)
        raise RuntimeError("no such model")

    server = Server(ServerSettings(port=0, model_name="big"), load)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: server.port)
    with client_of(server) as client:
        assert client._client.get(f"{url_of(server)}/health").status_code == 200
        told = []
        for _ in range(2):
            ready = client._client.get(f"{url_of(server)}/ready")
            assert ready.status_code == 503
            told.append(ready.json())
            time.sleep(0.2)
        assert [(one["status"], one["model"]) for one in told] == [("loading", "big")] * 2
        assert told[0]["seconds"] < told[1]["seconds"] < SECONDS
        assert told[0]["memory_mb"] is None or 50 < told[0]["memory_mb"] < 50_000
        wait_until(lambda: len(loading()) > 1)
        first, second, *_ = loading()
        assert first["seconds"] < second["seconds"]
        assert first["model"] == "big"
        with pytest.raises(openai.InternalServerError, match="loading") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.response.headers["retry-after"] == "10"
    go.set()
    thread.join(SECONDS)
    assert str(failed[0]) == "no such model"


Log = list[dict[str, Any]]


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, Log]]:
    """The command line's server in a process, ready; its URL; and what it logs from then on."""
    words = ["-m", "qwen3_omni_neuron.cli", "serve", "--port", "0", "--threads", "1", *arguments]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines, log = process.stderr, Log()

    def read() -> None:
        log.extend(json.loads(line) for line in lines if line.startswith("{"))

    try:
        for line in lines:
            found = json.loads(line) if line.startswith("{") else {}
            if found.get("event") == "ready":
                break
        threading.Thread(target=read, daemon=True).start()
        yield process, found["url"], log
    finally:
        process.kill()
        process.wait()


def long_stream(url: str) -> tuple[OpenAI, Iterator[Any]]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {k: v for k, v in LONG.items() if k.startswith(("thinker", "talker"))}
    asked: Any = {k: v for k, v in LONG.items() if k not in extra}
    asked["model"] = client.models.list().data[0].id
    extra["talker_max_new_tokens"] = 300
    stream = iter(client.chat.completions.create(**asked, extra_body=extra))
    next(stream)
    return client, stream


def test_sigterm_lets_requests_end() -> None:
    with command() as (process, url, _):
        client, stream = long_stream(url)
        with closing(client):
            process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.choices[0].finish_reason
        assert process.wait(SECONDS) == 0


@pytest.mark.usefixtures("slow_steps")
def test_a_second_signal_ends_all_at_once(omni: Qwen3Omni) -> None:
    with serving(omni) as server, connected(server) as sock:
        body = json.dumps(LONG).encode()
        sock.sendall(head(len(body)) + body)
        sock.recv(100)
        server.stop()
        time.sleep(0.2)
        assert omni.status().running == 1
        server.stop()
        answer_of(sock)
        wait_until(lambda: omni.status().running == 0, 3)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def stage_pids(server: int) -> dict[str, int]:
    """The processes of a server's stages."""
    lines = {p: command_line(p) for p in Path("/proc").iterdir() if p.name.isdecimal()}
    parent = f"parent={server})".encode()
    # They are started in this order.
    pids = sorted(
        int(p.name) for p, line in lines.items() if parent in line and b"process.server" in line
    )
    return dict(zip(STAGES, pids, strict=True))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="no /proc, which Linux has"
)
SPLIT = ("--placement", "split", "--model", str(SPEAKING_CHECKPOINT))
ENDED = "the model has ended. The request may be sent again: the server starts anew."


@needs_proc
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_crashes_fails_its_requests_and_ends_the_server_with_70(stage: str) -> None:
    """Clients are told nothing of it but that; the log has what the process printed."""
    with command(*SPLIT) as (process, url, log):
        with ExitStack() as clients:
            streams = []
            for _ in range(3):
                client, stream = long_stream(url)
                clients.enter_context(closing(client))
                streams.append(stream)
            os.kill(stage_pids(process.pid)[stage], signal.SIGSEGV)
            for stream in streams:
                with pytest.raises(openai.APIError) as failed:
                    list(stream)
                assert failed.value.message == ENDED
        assert process.wait(SECONDS) == 70
        wait_until(lambda: any(line["event"] == "model_died" for line in log))
        (died,) = (line for line in log if line["event"] == "model_died")
        assert f"The {stage} engine" in died["reason"]
        assert "Fatal Python error: Segmentation fault" in died["reason"]


@needs_proc
def test_a_stage_that_is_killed_while_nothing_runs_ends_the_server_with_70() -> None:
    with command(*SPLIT) as (process, _, log):
        os.kill(stage_pids(process.pid)["vocoder"], signal.SIGKILL)
        assert process.wait(SECONDS) == 70
        wait_until(lambda: any(line["event"] == "model_died" for line in log))


class DyingModel(ScriptedModel):
    """A model of which a process dies. fault: what its status says then."""

    fault: str | None = None

    def status(self) -> Status:
        return replace(super().status(), fault=self.fault)


def test_a_server_whose_model_dies_while_nothing_runs_says_so() -> None:
    model = DyingModel(["Hello."])
    with serving(model) as server, connected(server) as slow:  # type: ignore[arg-type]
        slow.sendall(head(10))  # what waits for its body keeps the server until it has drained
        wait_until(lambda: server._gate.running == 1)
        http = client_of(server)._client
        assert [http.get(f"{url_of(server)}/{p}").status_code for p in ("ready", "health")] == [
            *(200, 200),
        ]
        model.fault = "The talker engine (process 7) was ended by SIGSEGV.\nFile /usr/secret.py"
        wait_until(lambda: not server.service.model.ready)
        ready, health = (http.get(f"{url_of(server)}/{path}") for path in ("ready", "health"))
        assert (ready.status_code, ready.json()["status"]) == (503, "failed")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "process or thread of the model has died" in health.json()["reason"]
        assert "secret" not in health.text and "process 7" not in health.text
        with client_of(server) as client, pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.status_code == 503 and "secret" not in str(refused.value)
        slow.close()
        wait_until(lambda: server._uvicorn.should_exit)
    assert server._status == 70


class Exiting:
    """A thinker whose step ends its thread, once it may."""

    def __init__(self, engine: Any):
        self._engine, self.exits = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *given: Any) -> Any:
        if self.exits:
            sys.exit("a library has had enough")
        return self._engine.step(*given)


def test_a_stages_thread_that_ends_fails_its_requests_and_ends_the_server_with_70(
    checkpoint: Path,
) -> None:
    thinkers: list[Exiting] = []

    def wrap(engines: Engines) -> Engines:
        thinkers.append(Exiting(engines.thinker))
        return replace(engines, thinker=thinkers[0])  # type: ignore[arg-type]

    with (
        Qwen3Omni.load(checkpoint, max_concurrency=1, wrap_engines=wrap) as omni,
        serving(omni) as server,
        client_of(server) as client,
    ):
        asked: Any = {k: v for k, v in LONG.items() if not k.startswith(("thinker", "talker"))}
        extra = {k: v for k, v in LONG.items() if k not in asked}
        stream = iter(client.chat.completions.create(**asked, extra_body=extra))
        next(stream)
        thinkers[0].exits = True
        with pytest.raises(openai.APIError, match=re.escape(ENDED)):
            list(stream)
        wait_until(lambda: server._uvicorn.should_exit)
    assert server._status == 70


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    from qwen3_omni_neuron.errors import OutputError
    from qwen3_omni_neuron.serving.settings import ServerSettings

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(OutputError, match="can't be listened on"):
            Server(settings, lambda: ScriptedModel([])).run()  # type: ignore[arg-type, return-value]


def test_https_is_served_where_there_is_a_certificate(omni: Qwen3Omni, tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(cert))
    with serving(omni, tls_cert=cert, tls_key=key) as server:
        url = url_of(server).replace("http://", "https://")
        with urlopen(f"{url}/ready", context=context) as answer:
            assert json.load(answer)["status"] == "ready"


def test_the_log_has_a_line_a_request_and_content_only_where_it_is_asked_for(
    omni: Qwen3Omni, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for content in (False, True):
        caplog.clear()
        with serving(omni, log_content=content) as server, client_of(server) as client:
            logs.logger.setLevel(logging.INFO)
            answer = client.chat.completions.with_raw_response.create(**ASKED)
            wait_until(lambda: any(r.getMessage() == "request" for r in caplog.records))
        (record,) = [r for r in caplog.records if r.getMessage() == "request"]
        fields = vars(record)
        assert fields["request_id"] == answer.headers["x-request-id"]
        assert (fields["status"], fields["path"]) == (200, "/v1/chat/completions")
        assert fields["text_tokens"] == 2
        assert fields["ttft_s"] > 0
        assert ("Hello" in str(fields.get("question"))) == content
        assert ("answer" in fields) == content


def test_eight_vanishing_clients_at_once_do_not_slow_a_ninth(
    omni: Qwen3Omni, server: Server
) -> None:
    body = json.dumps(LONG).encode()

    async def vanish() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head(len(body)) + body)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(vanish() for _ in range(8)))

    asyncio.run(all_of_them())
    still_answers(server)
    wait_until(lambda: omni.status().running == 0)
