"""Clients of /v1/realtime that send what they should not, by the frame where they must."""

import contextlib
import os
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection

from test.hostile.attacks.outcomes import (
    ANSWERED,
    CLOSES,
    CUT,
    REFUSED,
    SILENT,
    WAIT_S,
    Outcome,
    inner_of,
    wrong_of,
)
from test.hostile.attacks.target import Target
from testing.command_line import InputError
from testing.websocket_client import opened, received, send


@contextlib.contextmanager
def session(target: Target, **changed: Any) -> Iterator[ClientConnection]:
    """Open a realtime session. changed: fields of its first session.update, if there are any."""
    with connected(target, target.key) as made:
        if changed:
            send(made, "session.update", session={"type": "realtime", **changed})
            until(made, "session.updated")
        yield made


def connected(target: Target, key: str | None) -> ClientConnection:
    """Return an open session. Raises websockets' and the system's errors."""
    return opened(
        target.front,
        key,
        max_queue=1,  # reads no further than what the client takes
        compression=None,
        ping_interval=None,
        open_timeout=WAIT_S,
        close_timeout=2,
    )


def handshake(target: Target, key: str | None) -> tuple[ClientConnection | None, Outcome]:
    """Try to open a session. Returns it, or None, and the outcome."""
    start_s = time.monotonic()
    try:
        return connected(target, key), Outcome(ANSWERED, 101)
    except InvalidStatus as error:
        late_s, answer = time.monotonic() - start_s, error.response
        headers = {name.lower(): value for name, value in answer.headers.raw_items()}
        code, wrong = wrong_of(answer.status_code, headers, bytes(answer.body or b""))
        return None, Outcome(REFUSED, answer.status_code, code, wrong, late_s)
    except (OSError, InvalidHandshake, ConnectionClosed):
        return None, Outcome(CUT)


def until(made: ClientConnection, *kinds: str, wait_s: float = WAIT_S) -> dict[str, Any]:
    """Receive events until one of these types, and return it.

    Raises InputError for an error event of no such type, and TimeoutError.
    """
    end_s = time.monotonic() + wait_s
    while True:
        event = received(made, max(0.0, end_s - time.monotonic()))
        if event["type"] in kinds:
            return event
        if event["type"] == "error":
            raise InputError(f"{kinds[0]} was waited for, and came {event['error']['message']!r}.")


def outcome_of(
    made: ClientConnection, sent_bytes: int, *good: str, label: str = "", wait_s: float = WAIT_S
) -> Outcome:
    """Wait for an error, a close, or an event of the types `good`, which mean success."""
    sent_s = time.monotonic()
    try:
        event = until(made, "error", "response.done", *good, wait_s=wait_s)
    except TimeoutError:
        return Outcome(SILENT, wrong="no event within the time", label=label)
    except ConnectionClosed as error:
        return closed(error, sent_s, sent_bytes, label)
    late_s = time.monotonic() - sent_s
    failure = event.get("error")
    if event["type"] == "response.done" and event["response"]["status"] == "failed":
        failure = event["response"]["status_details"]["error"]
    if failure is None:
        return Outcome(ANSWERED, label=label, sent_bytes=sent_bytes)
    code, text = str(failure.get("code")), str(failure.get("message", ""))
    wrong = "it failed inside" if code == "internal_error" else inner_of(text)
    return Outcome(REFUSED, 0, code, wrong, late_s, sent_bytes, label)


def closed(error: ConnectionClosed, sent_s: float, sent_bytes: int, label: str = "") -> Outcome:
    """Return the outcome of a socket that the server closed, or cut."""
    late_s = time.monotonic() - sent_s
    if error.rcvd is None:
        return Outcome(CUT, late_s=late_s, sent_bytes=sent_bytes, label=label)
    wrong = "" if error.rcvd.code in CLOSES else f"closed with {error.rcvd.code}"
    return Outcome(REFUSED, error.rcvd.code, "", wrong, late_s, sent_bytes, label)


def frame(opcode: int, content: bytes, fin: bool = True, length: int | None = None) -> bytes:
    """Return a masked WebSocket frame. length: replaces its content's length in the header."""
    length = len(content) if length is None else length
    mask = os.urandom(4)
    first = bytes([opcode | (0x80 if fin else 0)])
    if length < 126:
        head = first + bytes([0x80 | length])
    elif length < 1 << 16:
        head = first + struct.pack(">BH", 0x80 | 126, length)
    else:
        head = first + struct.pack(">BQ", 0x80 | 127, length)
    masks = mask * (len(content) // 4 + 1)
    whole = int.from_bytes(content, "big") ^ int.from_bytes(masks[: len(content)], "big")
    return head + mask + whole.to_bytes(len(content), "big")


def send_frames(target: Target, frames: Iterable[bytes], label: str = "") -> Outcome:
    """Open a session, send frames unchanged, and wait for the outcome."""
    sent = 0
    with session(target) as made:
        until(made, "session.created")
        with contextlib.suppress(OSError):  # it is closed already
            for data in frames:
                made.socket.sendall(data)
                sent += len(data)
        return outcome_of(made, sent, label=label, wait_s=15)
