"""Plain sockets: for bytes that are no request, and for clients that stop in one or read slowly."""

import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from testing.http_client import ask, unchecked

CHAT = "/v1/chat/completions"
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
UPGRADE = (
    "GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    "connection: upgrade\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def connected(
    url: str,
    timeout_s: float = SECONDS,
    *,
    source: str | None = None,
    buffer_bytes: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> socket.socket:
    """Connect to a server, with TLS where its URL says so.

    source: own address. buffer_bytes: size of the buffer for what comes; None for the system's.
    tls: None for a context that accepts any certificate.
    """
    parts = urlsplit(url)
    sock = socket.socket()
    try:
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(timeout_s)
        if source is not None:
            sock.bind((source, 0))
        secure = parts.scheme == "https"
        sock.connect((parts.hostname, parts.port or (443 if secure else 80)))
        if not secure:
            return sock
        return (tls or unchecked()).wrap_socket(sock, server_hostname=parts.hostname)
    except BaseException:
        sock.close()
        raise


def head_of(
    length: int | None,
    path: str = CHAT,
    headers: Mapping[str, str] | None = None,
    host: str = "localhost",
) -> bytes:
    """Return the head of a request with a body. length: None for a body in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", size]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def rest_of(sock: socket.socket, pause_s: float = 0.0, size: int = 1 << 16) -> bytes:
    """Return what comes until the connection ends, or nothing more does.

    pause_s: time between two reads of at most `size` bytes.
    """
    data = bytearray()
    with suppress(OSError):
        while part := sock.recv(size):
            data += part
            time.sleep(pause_s)
    return bytes(data)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def still_answers(url: str) -> None:
    """Assert that a server answers a request."""
    assert ask(url + CHAT, ASKED).json()["choices"][0]["finish_reason"] == "length"
