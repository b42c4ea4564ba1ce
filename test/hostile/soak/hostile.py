"""A handful of cheap requests that ask for much: bombs, long texts, deep JSON, slow connections."""

import base64
import json
import random
import time
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from test.hostile.attacks.files import chunk
from testing.http_client import JSON, Answer, ask
from testing.raw_http import CHAT, connected, head_of

MIB = 1 << 20
PNG_SIDES = (4000, 12_000)  # within --max-pixels, and above it
SLOW_S = 8.0  # connection time of a slow client
CLOSED_S = 30.0  # a server's time to close a silent connection
REPLY_S = 120.0

Hostile = Callable[[str, str, random.Random], str]


def status_of(answer: Answer) -> str:
    return str(answer.status)


def picture(url: str, source: str, draw: random.Random) -> str:
    """Send one to eight PNGs of a few kilobytes and millions of pixels."""
    data = "data:image/png;base64," + base64.b64encode(png(draw.choice(PNG_SIDES))).decode()
    part = {"type": "image_url", "image_url": {"url": data}}
    return status_of(chat(url, source, [part] * draw.randrange(1, 9)))


def long_text(url: str, source: str, draw: random.Random) -> str:
    words = "word " * (8 * MIB // 5)
    return status_of(chat(url, source, words))


def deep_json(url: str, source: str, draw: random.Random) -> str:
    depth = draw.choice((200, 10_000, 100_000))
    body = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
    return status_of(ask(url + CHAT, body, JSON, source=source))


def half_open(url: str, source: str, draw: random.Random) -> str:
    """Send nothing, or half of a request's head, until the server closes the connection."""
    with connected(url, CLOSED_S, source=source) as sock:
        sock.sendall(
            draw.choice((b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1"))
        )
        while sock.recv(4096):
            pass
    return "closed"


def slow_reader(url: str, source: str, draw: random.Random) -> str:
    """Ask for a long spoken answer, read it slowly, and disconnect."""
    asked = {
        "model": "load",
        "messages": [{"role": "user", "content": "say three five"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": True,
        "thinker_eos_token_id": 10**6,
        "thinker_max_new_tokens": 300,
        "talker_max_new_tokens": 300,
    }
    body = json.dumps(asked).encode()
    with connected(url, REPLY_S, source=source, buffer_bytes=4096) as sock:
        sock.sendall(head_of(len(body)) + body)
        end_s = time.monotonic() + SLOW_S
        while time.monotonic() < end_s and sock.recv(1000):
            time.sleep(0.1)
    return "left"


def chat(url: str, source: str, content: Any) -> Answer:
    asked = {"model": "load", "messages": [{"role": "user", "content": content}]}
    return ask(url + CHAT, asked, source=source)


@cache
def png(side: int) -> bytes:
    """Return a black PNG with one bit a pixel, of a few kilobytes."""
    header = side.to_bytes(4, "big") * 2 + bytes((1, 0, 0, 0, 0))
    rows = zlib.compress(bytes((1 + side // 8) * side), 9)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


# How often each kind is sent, relative to the others.
HOSTILE: dict[Hostile, int] = {picture: 4, deep_json: 4, half_open: 3, slow_reader: 2, long_text: 1}


def is_answer(outcome: str) -> bool:
    """Return whether a server may answer a hostile request so: without an error of its own."""
    return not outcome.isdecimal() or outcome == "503" or int(outcome) < 500
