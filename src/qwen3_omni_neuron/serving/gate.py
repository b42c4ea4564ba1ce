"""The gate before every endpoint: request ids, keys, rates, bodies, deadlines, lost clients."""

import asyncio
import json
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.context import Context
from qwen3_omni_neuron.serving.errors import RETRY_S, ApiError, api_error_of
from qwen3_omni_neuron.serving.keys import Keys, Rates
from qwen3_omni_neuron.serving.service import Service

OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key, count towards no rate and are answered while the server drains."""
MOST_HEADERS, MOST_HEADER_BYTES = 100, 1 << 15
_CANCEL_AGAIN_S = 0.5
_WATCHED = ("/metrics", *OPEN_PATHS)
_KNOWN = (
    *("/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"),
    *("/v1/models", "/v1/audio/voices", *_WATCHED),
)


class Gate:
    """ASGI application in front of another one.

    A body is read as a whole, within its limits, after its sender has shown a key. A client that
    leaves, and a request that takes too long, cancel the task that answers it. Every answer gets a
    request id and a line in the log. For one event loop.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        settings = service.settings
        self._keys, self._rates = Keys(settings.api_keys), Rates(settings.requests_per_minute)
        self._held_bytes = 0
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "lifespan and websockets are off"
        request_id = f"req_{secrets.token_hex(12)}"
        context = Context(request_id, scope["method"], scope["path"])
        scope["context"] = context
        answer = _Answer(send, context)
        watched = scope["path"] in _WATCHED
        self.running += not watched
        self._service.metrics.in_progress.inc(not watched)
        try:
            await self._admit(scope, receive, context)
            await self._run(scope, receive, answer, context)
        except ApiError as error:
            context.error = error.code
            context.release_body()
            await answer.refuse(error)
        except Exception as error:  # whatever no handler has taken
            context.error = "internal_error"
            logs.logger.exception("failed", extra={"request_id": request_id})
            await answer.refuse(api_error_of(error))
        finally:
            context.release_body()
            self.running -= not watched
            self._service.metrics.in_progress.dec(not watched)
            self._note(context)

    async def _admit(self, scope: Scope, receive: Receive, context: Context) -> None:
        """Check key, rate and state, and read the body. Raises ApiError."""
        raw = scope["headers"]
        if len(raw) > MOST_HEADERS or sum(len(n) + len(v) for n, v in raw) > MOST_HEADER_BYTES:
            raise ApiError(
                431,
                f"a request may have {MOST_HEADERS} headers, of {MOST_HEADER_BYTES} bytes in all.",
                "headers_too_large",
            )
        if context.path in OPEN_PATHS:
            return
        headers = dict(scope["headers"])
        address = scope["client"][0] if scope.get("client") else "unknown"
        authorization = headers.get(b"authorization")
        context.owner = self._keys.owner(
            None if authorization is None else authorization.decode("latin-1"), address
        )
        if context.path == "/metrics":
            return
        if self._service.model.state in ("draining", "failed"):
            self._service.model.take()
        self._rates.count(context.owner)
        if context.method == "POST":
            self._service.model.take()
            await self._read_body(headers, receive, context)

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive, context: Context
    ) -> None:
        settings, parts = self._service.settings, list[bytes]()
        length = headers.get(b"content-length", b"0")
        self._check_size(int(length) if length.isdigit() else 0)
        reserved = 0

        def release(_: int) -> None:
            self._held_bytes -= reserved

        context.on_release = release

        async def read() -> None:
            nonlocal reserved
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client left.", "client_left")
                part = message.get("body", b"")
                parts.append(part)
                reserved += len(part)
                self._held_bytes += len(part)
                self._check_size(reserved)
                if self._held_bytes > settings.max_bodies_bytes:
                    raise ApiError(
                        503,
                        "the server holds as many bytes of requests as it may. Try again soon.",
                        "too_many_bytes",
                        retry_after_s=RETRY_S,
                    )
                more = message.get("more_body", False)

        try:
            await asyncio.wait_for(read(), settings.body_timeout_s)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {settings.body_timeout_s:g} s. Send less, or "
                "faster.",
                "body_timeout",
            ) from None
        context.body = b"".join(parts)

    def _check_size(self, size: int) -> None:
        most = self._service.settings.max_body_bytes
        if size > most:
            raise ApiError(
                413,
                f"the body has more than {most} bytes, the most that is taken. Send less, or media "
                "in a compressed format.",
                "body_too_large",
            )

    async def _run(
        self, scope: Scope, receive: Receive, answer: "_Answer", context: Context
    ) -> None:
        """Run the endpoint until it has answered, its client has left, or its time is over."""

        async def nothing_more() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def answered() -> None:
            await self._app(scope, nothing_more, answer.send)

        answering = asyncio.create_task(answered())
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait(
                (answering, leaving),
                timeout=self._service.settings.request_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            done = answering.done()
            leaving.cancel()
            while not answering.done():  # again where something has swallowed the cancel
                answering.cancel()
                await asyncio.wait((answering,), timeout=_CANCEL_AGAIN_S)
            await asyncio.wait((leaving,))
        if done:
            answering.result()
        elif leaving.cancelled():
            raise ApiError(
                504,
                f"no answer within {self._service.settings.request_timeout_s:g} s. Ask for less.",
                "request_timeout",
            )
        else:
            context.error = "client_left"

    def _note(self, context: Context) -> None:
        path = context.path if context.path in _KNOWN else "other"
        status = "left" if context.error == "client_left" else str(context.status)
        self._service.metrics.requests.labels(path, status).inc()
        if context.path not in _WATCHED:
            fields = context.log_fields()
            self._service.metrics.seconds.observe(fields["seconds"])
            logs.event("request", **fields)


class _Answer:
    """Sender of one answer, which adds the request id and sees its status."""

    def __init__(self, send: Send, context: Context):
        self._send, self._context = send, context

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._context.status = message["status"]
            headers: Sequence[tuple[bytes, bytes]] = message.get("headers", ())
            request_id = (b"x-request-id", self._context.request_id.encode())
            message = {**message, "headers": [*headers, request_id]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error; where an answer has begun, leave it as it is, cut short."""
        if self._context.status:
            return
        body = json.dumps(error.body).encode()
        headers = {"content-type": "application/json", **error.headers}
        headers["content-length"] = str(len(body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": error.status, "headers": raw}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


async def _left(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
