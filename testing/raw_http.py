"""Requests over plain sockets, for clients that OpenAI's own can't imitate."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from qwen3_omni_neuron.serving.server import Server
from testing.http_server import client_of

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


@contextmanager
def connected(server: Server, **options: int) -> Iterator[socket.socket]:
    """Connect to a server. options: values of socket options by their names."""
    with closing(socket.socket()) as sock:
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(SECONDS)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def head(length: int | None, path: str = "/v1/chat/completions") -> bytes:
    """Return the headers of a request with a body. length: None for a body in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{size}\r\n\r\n".encode()


def answer_of(sock: socket.socket) -> bytes:
    """Return everything that comes until the connection ends, or nothing more does."""
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except OSError:
        pass
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def still_answers(server: Server) -> None:
    """Assert that a server answers a request."""
    with client_of(server) as client:
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"
