"""Clients over HTTP that send what they should not, by the byte where they must.

A request is timed from its last byte that could be sent to the first one of the answer.
"""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from test.hostile.attacks.good_client import MODEL
from test.hostile.attacks.outcomes import (
    ANSWERED,
    CUT,
    LEFT,
    REFUSED,
    SILENT,
    WAIT_S,
    Outcome,
    wrong_of,
)
from test.hostile.attacks.target import Target
from testing import raw_http
from testing.http_client import JSON, form
from testing.raw_http import CHAT, connected


def head_of(
    target: Target, path: str, length: int | None, more: Mapping[str, str] | None = None
) -> bytes:
    """Return the head of a POST with the attacker's key. length: None for a body in chunks."""
    key = {"authorization": f"Bearer {target.key}"} if target.key else {}
    return raw_http.head_of(length, path, {**key, **(more or {})}, target.host)


def post(
    target: Target,
    path: str,
    body: bytes,
    more: Mapping[str, str] | None = None,
    label: str = "",
    wait_s: float = WAIT_S,
    leave: bool = False,
) -> Outcome:
    """Send a request. leave: whether this client means to disconnect after wait_s."""
    data = head_of(target, path, len(body), {**JSON, **(more or {})}) + body
    return raw(target, data, label, wait_s, leave)


def chat(
    target: Target, label: str = "", wait_s: float = WAIT_S, leave: bool = False, **fields: Any
) -> Outcome:
    """Send a chat request: two tokens of text, unless fields say otherwise."""
    body = {"model": MODEL, "max_tokens": 2, "messages": [user("hello")], **fields}
    return post(target, CHAT, json.dumps(body).encode(), {}, label, wait_s, leave)


def user(*content: Any) -> dict[str, Any]:
    """Return a user's message, of one text or of parts."""
    text = len(content) == 1 and isinstance(content[0], str)
    return {"role": "user", "content": content[0] if text else list(content)}


def transcribe(target: Target, content: bytes, **how: Any) -> Outcome:
    """Send a sound file to be transcribed."""
    request = form({"model": MODEL.encode()}, content)
    return post(target, "/v1/audio/transcriptions", *request, **how)


def raw(
    target: Target, data: bytes, label: str = "", wait_s: float = WAIT_S, leave: bool = False
) -> Outcome:
    """Send bytes over a connection, and read one answer."""
    try:
        sock = connected(target.front, wait_s)
    except OSError as error:
        cut = isinstance(error, ConnectionError | ssl.SSLError)
        return Outcome(CUT, label=label, wrong="" if cut else f"can't connect: {error}")
    with sock:
        with contextlib.suppress(OSError):  # it may be refused and cut before it is complete
            sock.sendall(data)
        found = answer_of(sock, time.monotonic(), leave)
    return replace(found, label=label, sent_bytes=len(data))


def answer_of(sock: socket.socket, sent_s: float, leave: bool = False) -> Outcome:
    """Read one answer from a connection. sent_s: when the last byte was sent."""
    answer = http.client.HTTPResponse(sock)
    try:
        answer.begin()
        late_s = time.monotonic() - sent_s
        body = answer.read()
    except TimeoutError:
        return Outcome(LEFT) if leave else Outcome(SILENT, wrong="no answer within the time")
    except (OSError, http.client.HTTPException):
        return Outcome(CUT, late_s=time.monotonic() - sent_s)
    finally:
        answer.close()
    if answer.status == http.client.OK:
        return Outcome(ANSWERED, answer.status)
    headers = {name.lower(): value for name, value in answer.getheaders()}
    code, wrong = wrong_of(answer.status, headers, body)
    return Outcome(REFUSED, answer.status, code, wrong, late_s)


def at_once(calls: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
    """Make calls at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
