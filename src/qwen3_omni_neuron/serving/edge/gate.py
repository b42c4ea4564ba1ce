"""Middleware of all endpoints: request ids, hosts, keys, rates, bodies, deadlines."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from urllib.parse import urlsplit

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_omni_neuron.serving import logs, page, reference
from qwen3_omni_neuron.serving.edge.context import BODY_COPIES, Context
from qwen3_omni_neuron.serving.edge.response_socket import PATHS as RESPONSE_PATHS
from qwen3_omni_neuron.serving.edge.response_socket import ResponseSockets
from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.openai.fields import RESPONSES
from qwen3_omni_neuron.serving.openai.openapi import EXAMPLES
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.live_session import PATH as REALTIME
from qwen3_omni_neuron.serving.realtime.live_session import PATHS as REALTIME_PATHS
from qwen3_omni_neuron.serving.realtime.live_session import RealtimeSockets
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings

PROBES = ("/health", "/ready")
"""Paths open to everybody, for any host name and origin."""
OPEN_PATHS = (*PROBES, *page.FILES, *reference.PATHS)
"""Paths without key or rate, answered even while the server drains."""
MOST_HEADERS, MOST_HEADER_BYTES = 100, 1 << 15
_WATCHED = ("/metrics", *OPEN_PATHS)
_KNOWN = (*EXAMPLES, "/v1/models", "/v1/audio/voices", *REALTIME_PATHS, *_WATCHED)
_WANTED_METHOD, _WANTED_HEADERS = (
    b"access-control-request-method",
    b"access-control-request-headers",
)
_KEY_PROTOCOL = b"openai-insecure-api-key."  # a key's prefix in OpenAI's client for browsers

# Rounds of the event loop before an endpoint runs, to notice clients that have left: the backlog
# may have thousands of their requests.
_ROUNDS = 3
# Reading at memory speed would block the event loop. While others have requests, an owner rests
# after each part of a large body, of at most 256 KB.
_FIRST_BYTES, _REST_S = 1 << 18, 0.002


class Gate:
    """ASGI middleware in front of the application.

    It checks the key, reads the whole body within limits, and cancels the endpoint if the client
    leaves or the time limit is reached. Every answer gets a request id, the scope's `request_id` if
    set, and a log line. For one event loop.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        self._sockets: dict[str, ASGIApp] = {
            **dict.fromkeys(RESPONSE_PATHS, ResponseSockets(self, service)),
            **dict.fromkeys(REALTIME_PATHS, RealtimeSockets(service)),
        }
        self._sites = Sites(service.settings)
        self._reading = Counter[str]()  # large bodies, by owner
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = scope.get("request_id") or new_id("req_")
        method = scope.get("method", "WEBSOCKET")
        context = Context(request_id, method, scope["path"])
        scope["context"] = context
        scope["answer"] = answer = AnswerSender(send, self._service, context, scope["type"])
        watched = scope["path"] in _WATCHED
        self.running += not watched
        self._service.metrics.in_progress.inc(not watched)
        releases = ExitStack()
        try:
            admitted = await self._admit(scope, receive, context, releases)
            if not admitted:
                await answer.permit(dict(scope["headers"]).get(_WANTED_HEADERS, b""))
            elif scope["type"] == "websocket":
                await self._open(scope, receive, send, context)
            else:
                # GET endpoints answer HEAD, too: uvicorn omits the body.
                asked = {**scope, "method": "GET"} if method == "HEAD" else scope
                await self._run(asked, receive, answer, context)
        except asyncio.CancelledError:  # the server ends without waiting
            context.error = "cancelled"
            message = "the server ended before it had answered. Send the request again."
            await answer.refuse(ApiError(503, message, "cancelled", retry_after_s=RETRY_S))
            raise
        except Exception as error:
            releases.close()
            if context.error is None:  # otherwise answered by the application
                refusal = self._service.failed(error, context)
                context.refused(refusal)
                await answer.refuse(refusal)
        finally:
            del scope["answer"]  # breaks its reference cycle with the connection
            releases.close()
            context.body = b""
            self.running -= not watched
            self._service.metrics.in_progress.dec(not watched)
            self._note(context)

    async def _open(self, scope: Scope, receive: Receive, send: Send, context: Context) -> None:
        """Serve a socket until it ends. A message's bytes count until the next one is requested."""
        if scope["path"] not in self._sockets:
            path = scope["path"][:200]
            message = f"there is no socket at {path!r}, only at {REALTIME} and {RESPONSES}."
            raise ApiError(404, message, "unknown_url")
        account, held = context.account, 0

        async def counted() -> Message:
            nonlocal held
            account.release(held)
            held = 0
            await asyncio.sleep(0)  # before a waiting message, let others go first
            message = await receive()
            size = BODY_COPIES * len(message.get("text") or message.get("bytes") or "")
            try:
                account.hold(size)
            except ApiError as error:
                code = 1013  # try again later
                await send({"type": "websocket.close", "code": code, "reason": error.code})
                return {"type": "websocket.disconnect", "code": code}
            held = size
            return message

        await self._sockets[scope["path"]](scope, counted, send)

    async def _admit(
        self, scope: Scope, receive: Receive, context: Context, releases: ExitStack
    ) -> bool:
        """Check key, rate and state, and read the body. Raises ApiError.

        releases: frees the request's account and place. Returns False for an allowed page's
        preflight request, which has no key.
        """
        raw = scope["headers"]
        if len(raw) > MOST_HEADERS or sum(len(n) + len(v) for n, v in raw) > MOST_HEADER_BYTES:
            raise ApiError(
                431,
                f"a request may have {MOST_HEADERS} headers, of {MOST_HEADER_BYTES} bytes in all.",
                "headers_too_large",
            )
        if context.path not in PROBES:
            context.origin = self._sites.check(raw)
        headers = dict(raw)
        if sum(name == b"authorization" for name, _ in raw) > 1:
            message = "a request may have one Authorization header. Send one key."
            raise ApiError(400, message, "invalid_value")
        if context.origin is not None and context.method == "OPTIONS" and _WANTED_METHOD in headers:
            return False
        if context.path in OPEN_PATHS:
            return True
        address = scope["client"][0] if scope.get("client") else "unknown"
        authorization, keys = _authorization(headers), self._service.keys
        is_socket = scope["type"] == "websocket" and context.path in REALTIME_PATHS
        guest = keys.guest(authorization) if is_socket else None
        if guest is not None:
            context.owner, context.session = guest
        context.owner = context.owner or keys.owner(authorization, address)
        if context.path == "/metrics":
            return True
        if self._service.model.ending:
            self._service.model.take()
        self._service.rates.count(context.owner)
        context.account = self._service.account_of_request(context.owner)
        releases.callback(context.account.close)
        if context.method == "POST":
            # Once per request: it waits for a lock that stages take in every call.
            context.omni = self._service.model.take()
            await self._read_body(headers, receive, context)
        if scope["type"] == "http" and self._service.model.omni is not None:
            # After the body: a slow sender must not keep others waiting.
            context.place = releases.enter_context(self._service.requests.place(context.owner))
        return True

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive, context: Context
    ) -> None:
        settings, parts = self._service.settings, list[bytes]()
        length = headers.get(b"content-length", b"0")
        # No limit has 20 digits; int() raises ValueError for thousands.
        self._check_size(int(length.lstrip(b"0")[:20] or b"0") if length.isdigit() else 0)

        async def read() -> int:
            size, more = 0, True
            while more:
                if size > _FIRST_BYTES and self._service.requests.has_others(context.owner):
                    await self._rest(context.owner)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client left.", "client_left")
                part = message.get("body", b"")
                size += len(part)
                self._check_size(size)
                context.account.hold(BODY_COPIES * len(part))
                parts.append(part)
                more = message.get("more_body", False)
            return size

        try:
            with anyio.fail_after(settings.body_timeout_s):
                size = await read()
            if size > _FIRST_BYTES:
                context.body = await asyncio.to_thread(b"".join, parts)  # takes some ms
            else:
                context.body = b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"no complete body within {settings.body_timeout_s:g} s. Send less, or faster.",
                "body_timeout",
            ) from None
        finally:
            parts.clear()  # else a refusal's frames keep them until a garbage collection

    async def _rest(self, owner: str) -> None:
        self._reading[owner] += 1
        try:
            await asyncio.sleep(_REST_S * self._reading[owner])
        finally:
            self._reading[owner] -= 1
            if not self._reading[owner]:
                del self._reading[owner]

    def _check_size(self, size: int) -> None:
        most = self._service.settings.max_body_bytes
        if size > most:
            raise ApiError(
                413,
                f"the body has more than {most} bytes, the limit. Send less, or compressed media.",
                "body_too_large",
            )

    async def _run(
        self, scope: Scope, receive: Receive, answer: AnswerSender, context: Context
    ) -> None:

        async def nothing_more() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        timeout_s = self._service.settings.request_timeout_s
        with anyio.move_on_after(timeout_s) as answering:
            leaving = asyncio.create_task(_left(receive, answering))
            try:
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                await self._app(scope, nothing_more, answer.send)
            finally:
                leaving.cancel()
        if not answering.cancelled_caught:
            return
        if not leaving.done():
            raise ApiError(
                504, f"no answer within {timeout_s:g} s. Request less.", "request_timeout"
            )
        context.error = "client_left"

    def _note(self, context: Context) -> None:
        path = context.path if context.path in _KNOWN else "other"
        status = "left" if context.error == "client_left" else str(context.status)
        self._service.metrics.requests.labels(path, status).inc()
        if context.path not in _WATCHED:
            fields = context.log_fields()
            if context.method != "WEBSOCKET":  # one lasts as long as its conversation
                self._service.metrics.seconds.observe(fields["seconds"])
            logs.event("request", **fields)


def _authorization(headers: dict[bytes, bytes]) -> bytes | None:
    """Return the authorization header, or a browser's substitute on a WebSocket."""
    given = headers.get(b"authorization")
    if given is not None:
        return given
    for name in headers.get(b"sec-websocket-protocol", b"").split(b","):
        if name.strip().startswith(_KEY_PROTOCOL):
            return b"Bearer " + name.strip().removeprefix(_KEY_PROTOCOL)
    return None


async def _left(receive: Receive, answering: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


class Sites:
    """Check of the headers Host and Origin, which browsers set truthfully.

    Without keys, any website could send requests to loopback through a visitor's browser, and read
    the answers after DNS rebinding. So only known names pass, and IP addresses, which can't be
    rebound.
    """

    def __init__(self, settings: ServerSettings):
        self._any_name = bool(settings.api_keys)
        self._names = {"localhost", *map(str.lower, (settings.host, *settings.allowed_hosts))}
        self._origins = settings.allowed_origins

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the origin of another host's allowed page, or None.

        Raises ApiError 403 for unknown host names and other hosts' pages.
        """
        hosts, origins = list[str](), list[str]()
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
        for host in hosts:
            if not self._any_name and not self._known(host):
                raise ApiError(
                    403,
                    f"this server has no keys, and {host[:100]!r} is not one of its names. Use its "
                    "IP address, or allow the name with --allow-host (fleet: allowed_hosts).",
                    "host_not_allowed",
                )
        for origin in origins:
            if origin not in self._origins and [_host_of(origin)] != hosts:
                raise ApiError(
                    403,
                    f"a page of {origin[:100]!r} may not use this server. Allow it with "
                    "--allow-origin (fleet: allowed_origins).",
                    "origin_not_allowed",
                )
        return origins[0] if origins and origins[0] in self._origins else None

    def _known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # an unclosed bracket
            return False
        return name in self._names or _is_address(name)


def _host_of(origin: str) -> str | None:
    """Return an origin's host and port; None for `null`, a page without a host."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
