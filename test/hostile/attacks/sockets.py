"""WebSockets: frames that are wrong or too many, sessions that take what others need."""

import base64
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, CUT, REFUSED, Outcome, check
from test.hostile.attacks.over_http import chat, user
from test.hostile.attacks.over_socket import (
    closed,
    frame,
    handshake,
    outcome_of,
    send_frames,
    session,
    until,
)
from test.hostile.attacks.target import ServerSpec, Target, waited
from testing.websocket_client import send

TEXT, BINARY, PING, CONTINUED = 1, 2, 9, 0
NO_OR_CUT = frozenset((REFUSED, CUT))
EITHER = frozenset((ANSWERED, REFUSED))
ANY = NO_OR_CUT | {ANSWERED}
PIECE, RATE = bytes(1 << 16), 24_000
PROXIED = ServerSpec(proxy=True)


def framing(frames: Callable[[], Iterable[bytes]]) -> Callable[[Target], list[Outcome]]:
    """Return an attack: a session that sends frames unchanged."""
    return lambda target: [send_frames(target, frames())]


def fragments() -> Iterator[bytes]:
    """Yield 64 MiB of one message that does not end."""
    yield frame(TEXT, b'{"', fin=False)
    yield from itertools.repeat(frame(CONTINUED, PIECE, fin=False), 1024)


def empty_fragments() -> Iterator[bytes]:
    """Yield 200,000 empty fragments of a message, and its end."""
    yield frame(TEXT, b"{", fin=False)
    yield from itertools.repeat(frame(CONTINUED, b"", fin=False) * 1000, 200)
    yield frame(CONTINUED, b"")


def wrong_frames(target: Target) -> list[Outcome]:
    """Send frames that the protocol forbids, one session each."""
    unmasked = b"\x81\x02{}"
    cases = {
        "of 2^62 bytes": [frame(TEXT, PIECE, length=1 << 62)],
        "of 30 MiB": [frame(TEXT, bytes(30 << 20))],
        "of no type": [frame(11, b"{}")],
        "continued from nothing": [frame(CONTINUED, b"{}")],
        "not masked": [unmasked],
        "no UTF-8": [frame(TEXT, b"\xff\xfe" * 1000)],
        "ping of 1000 bytes": [frame(PING, bytes(1000))],
        "reserved bits": [bytes([0xF1]) + frame(TEXT, b"{}")[1:]],
        "close of one byte": [frame(8, b"x")],
    }
    return [send_frames(target, frames, label) for label, frames in cases.items()]


def binary(target: Target) -> list[Outcome]:
    """Send binary messages where events are text."""
    return [
        send_frames(target, [frame(BINARY, b"{}")]),
        send_frames(target, [frame(BINARY, PIECE)]),
    ]


def surrogates(target: Target) -> list[Outcome]:
    """Send half of a surrogate pair where events and chats have text."""
    half = "\ud800"
    part = {"type": "input_text", "text": half}
    events: dict[str, dict[str, Any]] = {
        "session.update": {"session": {"type": "realtime", "instructions": half}},
        "conversation.item.create": {
            "item": {"type": "message", "role": "user", "content": [part]}
        },
        "response.create": {"response": {"instructions": half}},
    }
    found = [chat(target, "chat", messages=[user(half)])]
    with session(target) as made:
        until(made, "session.created")
        for kind, fields in events.items():
            sent = send(made, kind, **fields)
            found.append(outcome_of(made, sent, "session.updated", label=kind))
    return found


def pings(target: Target) -> list[Outcome]:
    """Send 100,000 pings and read nothing; then check whether the session continues, or ended."""
    with session(target) as made:
        until(made, "session.created")
        try:
            with contextlib.suppress(OSError):
                for _ in range(100):
                    made.socket.sendall(frame(PING, b"a" * 100) * 1000)
            sent = send(made, "input_audio_buffer.clear")
            return [outcome_of(made, sent, "input_audio_buffer.cleared")]
        except ConnectionClosed as error:
            return [closed(error, time.monotonic(), 0)]


def tiny_events(target: Target) -> list[Outcome]:
    """Send 20,000 events of a few bytes, wrong and right ones, and read all that comes back."""
    with session(target) as made:
        try:
            for _ in range(100):
                for _ in range(100):
                    made.send('{"type":"x"}')
                    made.send("[]")
                for _ in range(200):
                    until(made, "error")
            sent = send(made, "input_audio_buffer.clear")
            return [outcome_of(made, sent, "input_audio_buffer.cleared")]
        except ConnectionClosed as error:
            return [closed(error, time.monotonic(), 0)]


def unread_events(target: Target) -> list[Outcome]:
    """Have 18 MB of sound sent back again and again, and read nothing: the session is cut."""
    with session(target, **_pcm(None)) as made:
        item_id = _recorded(made)
        event = json.dumps({"type": "conversation.item.retrieve", "item_id": item_id}).encode()
        with contextlib.suppress(OSError):
            for _ in range(100):
                made.socket.sendall(frame(TEXT, event))
        counted = "qwen3_omni_realtime_sessions"
        ended = waited(lambda: not target.counters().get(counted), target.deadlines.send_s + 25)
        made.close_socket()
    return [check(ended, "the session is open still")]


def retrieved(target: Target) -> list[Outcome]:
    """Have 18 MB of sound sent back five times, and read it."""
    found = []
    with session(target, **_pcm(None)) as made:
        item_id = _recorded(made)
        for _ in range(5):
            sent = send(made, "conversation.item.retrieve", item_id=item_id)
            found.append(outcome_of(made, sent, "conversation.item.retrieved"))
    return found


def many_sockets(target: Target) -> list[Outcome]:
    """Open 100 sessions with one key, and keep them open."""
    tried = [handshake(target, target.key) for _ in range(100)]
    for made, _ in tried:
        if made is not None:
            made.close_socket()
    return [outcome for _, outcome in tried]


def _pcm(transcription: dict[str, str] | None) -> dict[str, Any]:
    sound = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": None}
    return {"audio": {"input": {**sound, "transcription": transcription}}}


def _recorded(made: ClientConnection) -> str:
    """Put one turn of 300 s of silence into a conversation. Returns its id."""
    size = 300 * 2 * RATE
    send(made, "input_audio_buffer.append", audio=base64.b64encode(bytes(size)).decode())
    send(made, "input_audio_buffer.commit")
    return str(until(made, "conversation.item.done")["item"]["id"])


KINDS = (
    Kind("socket-fragments", "64 MiB of a message without end", framing(fragments), NO_OR_CUT),
    Kind("socket-empty-fragments", "200,000 empty fragments", framing(empty_fragments), NO_OR_CUT),
    Kind("socket-frames", "frames that the protocol forbids", wrong_frames, NO_OR_CUT),
    Kind("socket-binary", "binary frames", binary, NO_OR_CUT),
    Kind(
        "socket-surrogates",
        "half of a surrogate pair in events and chats",
        surrogates,
        frozenset((REFUSED,)),
    ),
    Kind("socket-pings", "100,000 pings, unread", pings, ANY),
    Kind("socket-tiny-events", "20,000 events of a few bytes", tiny_events, ANY),
    Kind("socket-many", "100 sessions of one key", many_sockets, EITHER),
    Kind("realtime-retrieve", "18 MB of sound sent back five times", retrieved, EITHER),
    Kind("realtime-unread", "the same a hundred times, unread", unread_events, ANY, PROXIED),
)
