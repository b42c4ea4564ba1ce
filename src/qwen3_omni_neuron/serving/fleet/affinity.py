"""Session affinity: a conversation's turns get one key, by which Ray routes them.

The last turn's replica has its KV rows. Ray's ConsistentHashRouter routes by the header
x-session-id; this module, in Ray's HTTP proxies, adds it if a client sends none.
"""

import hashlib
import json
import re
import secrets
from collections import deque
from typing import Any, Literal

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_HEADER = b"x-session-id"
CALLBACK = "qwen3_omni_neuron.serving.fleet.affinity.proxy_middlewares"
"""Value of RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH that makes Ray's proxies use this module."""
# Ends of the paths of conversations: an application may have a prefix before /v1.
PATHS = ("/chat/completions", "/responses")
# Only a body's beginning is parsed: all clients share the proxy, and keys are not yet checked.
BEGINNING_BYTES = 1 << 18
_NAME_BYTES = 16
_KEY = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}", re.ASCII)
# A response's id ends with its session's key: only the replica that answered has it.
_RESPONSE_ID = re.compile(rf"resp_[0-9a-f]{{32}}({_KEY.pattern})", re.ASCII)


def conversation_key(body: bytes, authorization: bytes = b"") -> str | None:
    """Return a hash of a request's first messages, None without them.

    It covers the API key, cache_key, instructions, and the messages up to the first user message,
    equal in all turns and continuations of a response. Data after BEGINNING_BYTES are ignored.
    """
    partial: Literal["trailing-strings", "off"] = "off"
    if len(body) > BEGINNING_BYTES:
        partial = "trailing-strings"
    try:
        request = from_json(body[:BEGINNING_BYTES], allow_partial=partial)
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
    content = authorization + b"\0" + text.encode()
    return hashlib.blake2b(content, digest_size=_NAME_BYTES).hexdigest()


def key_of_response(response_id: Any) -> str | None:
    """Return the session key in a response's id, or None."""
    found = _RESPONSE_ID.fullmatch(response_id) if isinstance(response_id, str) else None
    return None if found is None else found[1]


def is_session_key(value: str) -> bool:
    """Return whether a session's id is one of this module's keys."""
    return _KEY.fullmatch(value) is not None


def _beginning(request: dict[str, Any]) -> list[Any] | None:
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        for count, message in enumerate(messages, 1):
            if isinstance(message, dict) and message.get("role") == "user":
                return messages[:count]
    return None


class AffinityMiddleware:
    """ASGI middleware that adds the header by which Ray routes a conversation's requests.

    A request waits for its body's beginning. A new response without a key gets a random one for
    later turns; a request for a response has the key in the id. A client's own header stays.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers, path = list(scope["headers"]), scope["path"]
        key, read = None, deque[Message]()
        if not dict(headers).get(SESSION_HEADER):
            if scope.get("method") == "POST" and path.endswith(PATHS):
                begun = await _begun(receive, read)
                key = conversation_key(begun, dict(headers).get(b"authorization", b""))
                if key is None and path.endswith(PATHS[1]):
                    key = secrets.token_hex(_NAME_BYTES)
            else:  # the last part of a path, or the one before it, is the response's id
                key = next(filter(None, map(key_of_response, path.split("/")[-2:])), None)
        if key is not None:
            headers.append((SESSION_HEADER, key.encode()))

        async def again() -> Message:
            return read.popleft() if read else await receive()

        return await self._app({**scope, "headers": headers}, again, send)


async def _begun(receive: Receive, read: deque[Message]) -> bytes:
    """Return a body's beginning, and append its messages to `read`."""
    parts, size, more = list[bytes](), 0, True
    while more and size <= BEGINNING_BYTES:
        message = await receive()
        read.append(message)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
    return b"".join(parts)


def proxy_middlewares() -> list[Any]:
    """Return the middlewares of Ray's HTTP proxies; see CALLBACK."""
    from starlette.middleware import Middleware

    return [Middleware(AffinityMiddleware)]
