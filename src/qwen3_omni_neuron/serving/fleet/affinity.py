"""Session affinity: all turns of a conversation get one key, by which Ray routes them.

The replica that answered the last turn holds its KV rows. Ray's ConsistentHashRouter routes by the
header x-session-id; this module, in Ray's HTTP proxies, adds the header where a client sends none.
"""

import asyncio
import hashlib
import json
import os
import re
import secrets
from collections import deque
from typing import Any, Literal

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_HEADER = "x-session-id"
CALLBACK = "qwen3_omni_neuron.serving.fleet.affinity.proxy_middlewares"
"""Value of RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH that makes Ray's proxies use this module."""
# Ends of the paths of conversations: an application may have a prefix before /v1.
PATHS = ("/chat/completions", "/responses", "/responses/input_tokens")
# Only the beginning of a body is parsed, and only if it has few values: all clients share the
# proxy's event loop and memory, and no API key has been checked yet.
BEGINNING_BYTES = 1 << 18
MOST_VALUES = 1 << 15
MOST_SESSION_ID = 256
_NAME_BYTES = 16
_KEY = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}", re.ASCII)
# A response's id ends with the key of the session that it was made in: only the replica that made
# it has it.
_RESPONSE_ID = re.compile(rf"resp_[0-9a-f]{{32}}({_KEY.pattern})", re.ASCII)


def conversation_key(body: bytes, authorization: bytes = b"") -> str | None:
    """Return a hash of the beginning of a request's conversation, None where it has none.

    It covers the API key, the request's cache_key, the instructions of a response, and the messages
    up to the first user message, so that later turns have the same key, and conversations under one
    system prompt different ones. A response that continues another one has that one's key.
    Data after the first BEGINNING_BYTES of the body is ignored.
    """
    begun = body[:BEGINNING_BYTES]
    if sum(map(begun.count, (b",", b"[", b"{"))) > MOST_VALUES:
        return None
    partial: Literal["trailing-strings", "off"] = "off"
    if len(body) > BEGINNING_BYTES:
        partial = "trailing-strings"
    try:
        request = from_json(begun, allow_partial=partial)
        if not isinstance(request, dict):
            return None
        earlier = key_of_response(request.get("previous_response_id"))
        messages = _beginning(request)
        if earlier is not None or messages is None:
            return earlier
        covered = [request.get("cache_key"), messages]
        if request.get("instructions") is not None:
            covered.append(request["instructions"])
        text = json.dumps(covered, sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return _name(authorization + b"\0" + text.encode())


def key_of_response(response_id: Any) -> str | None:
    """Return the session key in a response's id, None where it has none."""
    found = _RESPONSE_ID.fullmatch(response_id) if isinstance(response_id, str) else None
    return None if found is None else found[1]


def is_session_key(value: str) -> bool:
    """Return whether a session's id is one of this module's keys."""
    return _KEY.fullmatch(value) is not None


def _beginning(request: dict[str, Any]) -> list[Any] | None:
    """Return the messages up to the first user message."""
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        for count, message in enumerate(messages, 1):
            if isinstance(message, dict) and message.get("role") == "user":
                return messages[:count]
    return None


def _name(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_NAME_BYTES).hexdigest()


class AffinityMiddleware:
    """ASGI middleware that adds the header by which Ray routes to each request of a conversation.

    A request waits until the beginning of its body has arrived, at most wait_s; a slower one
    continues without a key, except that each new response has one, by which later turns find it. A
    request for a response by its id has the key in the id. The application gets the same messages
    as without the middleware. A client's own header stays, unless Ray can't read its value: then it
    is hashed.
    """

    def __init__(self, app: ASGIApp, header: str = SESSION_HEADER, wait_s: float = 30.0):
        self._app, self._header, self._wait_s = app, header.lower().encode(), wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = [self._readable(name, value) for name, value in scope["headers"]]
        scope = {**scope, "headers": headers}
        has_key = any(value and self._is_session(name) for name, value in headers)
        path, posted = scope["path"], scope.get("method") == "POST"
        if has_key or not (posted and path.endswith(PATHS)):
            # The last part of a path, or the one before it, is the id of a response.
            named = map(key_of_response, () if has_key else path.split("/")[-2:])
            key = next(filter(None, named), None)
            self._add(headers, key)
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            begun = await body.begun(BEGINNING_BYTES, self._wait_s)
            authorization = dict(headers).get(b"authorization", b"")
            key = None if begun is None else conversation_key(begun, authorization)
            del begun  # a second copy: the messages hold the body, too
            if key is None and path.endswith(PATHS[1]):
                key = secrets.token_hex(_NAME_BYTES)
            self._add(headers, key)
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _add(self, headers: list[tuple[bytes, bytes]], key: str | None) -> None:
        if key is not None:
            headers.append((self._header, key.encode()))

    def _readable(self, name: bytes, value: bytes) -> tuple[bytes, bytes]:
        if self._is_session(name) and not (
            value.isascii() and value.decode().isprintable() and len(value) <= MOST_SESSION_ID
        ):
            value = _name(value).encode()
        return name, value

    def _is_session(self, name: bytes) -> bool:
        return name.lower().replace(b"_", b"-") == self._header.replace(b"_", b"-")


class _Body:
    """A request's messages: read ahead by `begun`, and passed on in their order by `receive`."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._read: deque[Message] = deque()
        self._reading: asyncio.Future[Message] | None = None

    async def begun(self, least_bytes: int, wait_s: float) -> bytes | None:
        """Read the body, or more than `least_bytes` of a longer one.

        Returns None if that takes more than wait_s, or the client leaves.
        """
        loop = asyncio.get_running_loop()
        until_s, parts, size = loop.time() + wait_s, list[bytes](), 0
        while True:
            self._reading = asyncio.ensure_future(self._receive())
            await asyncio.wait((self._reading,), timeout=until_s - loop.time())
            if not self._reading.done():
                return None
            message = self._reading.result()
            self._reading = None
            self._read.append(message)
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > least_bytes or not message.get("more_body", False):
                return b"".join(parts)

    async def receive(self) -> Message:
        """Return the next message, like the server's own `receive`."""
        if self._read:
            return self._read.popleft()
        if self._reading is None:
            return await self._receive()
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    def close(self) -> None:
        """Cancel the task that still waits for a message."""
        if self._reading is not None:
            self._reading.cancel()


def session_header() -> str:
    """Return the name of the header by which Ray routes."""
    return os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", SESSION_HEADER)  # as Ray reads it


def proxy_middlewares() -> list[Any]:
    """Return the middlewares of Ray's HTTP proxies; see CALLBACK."""
    from starlette.middleware import Middleware

    return [Middleware(AffinityMiddleware, header=session_header())]
