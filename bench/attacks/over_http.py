"""Clients over HTTP that send what they should not, by the byte where they must.

A request is timed from its last byte that could be sent to the first one of the answer.
"""

import contextlib
import http.client
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench.attacks.good_client import MODEL
from bench.attacks.outcomes import ANSWERED, CUT, LEFT, REFUSED, SILENT, WAIT_S, Outcome, wrong_of
from bench.attacks.target import Target


def opened(target: Target, timeout_s: float = WAIT_S) -> socket.socket:
    """Open a connection, with TLS where the server has it."""
    sock = socket.create_connection((target.host, target.port), timeout_s)
    if target.tls is None:
        return sock
    try:
        return target.tls.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


def head_of(
    target: Target, path: str, length: int | str, more: Mapping[str, str] | None = None
) -> bytes:
    """Return the head of a POST with the attacker's key."""
    lines = [f"POST {path} HTTP/1.1", f"host: {target.host}:{target.port}"]
    lines += [f"content-length: {length}"]
    lines += [f"authorization: Bearer {target.key}"] if target.key else []
    lines += [f"{name}: {value}" for name, value in (more or {}).items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1")


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
    more = {"content-type": "application/json", **(more or {})}
    data = head_of(target, path, len(body), more) + body
    return raw(target, data, label, wait_s, leave)


def chat(
    target: Target, label: str = "", wait_s: float = WAIT_S, leave: bool = False, **fields: Any
) -> Outcome:
    """Send a chat request: two tokens of text, unless fields say otherwise."""
    body = {"model": MODEL, "max_tokens": 2, "messages": [user("hello")], **fields}
    return post(target, "/v1/chat/completions", json.dumps(body).encode(), {}, label, wait_s, leave)


def user(*content: Any) -> dict[str, Any]:
    """Return a user's message, of one text or of parts."""
    text = len(content) == 1 and isinstance(content[0], str)
    return {"role": "user", "content": content[0] if text else list(content)}


def transcribe(target: Target, content: bytes, **how: Any) -> Outcome:
    """Send a sound file to be transcribed."""
    body, kind = form({"model": MODEL.encode()}, content)
    return post(target, "/v1/audio/transcriptions", body, {"content-type": kind}, **how)


def form(fields: Mapping[str, bytes], file: bytes, name: str = "a") -> tuple[bytes, str]:
    """Return a form with a file of this name, and its content type."""
    mark = secrets.token_hex(16)
    disposition = f"--{mark}\r\ncontent-disposition: form-data; name="
    parts = [f'{disposition}"{k}"\r\n\r\n'.encode() + v + b"\r\n" for k, v in fields.items()]
    parts += [f'{disposition}"file"; filename="{name}"\r\n\r\n'.encode(), file]
    body = b"".join((*parts, f"\r\n--{mark}--\r\n".encode()))
    return body, f"multipart/form-data; boundary={mark}"


def raw(
    target: Target, data: bytes, label: str = "", wait_s: float = WAIT_S, leave: bool = False
) -> Outcome:
    """Send bytes over a connection, and read one answer."""
    try:
        sock = opened(target, wait_s)
    except OSError as error:
        return Outcome(CUT, label=label, wrong="" if _cut(error) else f"can't connect: {error}")
    with contextlib.closing(sock):
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


def _cut(error: OSError) -> bool:
    return isinstance(error, ConnectionError | ssl.SSLError)
