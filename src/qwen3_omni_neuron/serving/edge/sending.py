"""Sending of a request's answer, at the client's pace."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import anyio
from starlette.types import Message, Send

from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.service import Service

PIECE_BYTES = 1 << 16
"""Largest part of an answer sent at a time."""
WARNINGS = b"x-warnings"
"""Header with sentences about files that are used partly or unexpectedly."""
_RATES = "limit", "remaining", "reset"
_EXPOSED = (
    b"openai-processing-ms, retry-after, x-finish-reason, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-request-id, x-voice, x-warnings"
)
_MOST_HEADER = 2000  # bytes of the header with warnings: clients refuse long ones
WAITING_S = 15.0
"""Interval of comments until a stream's first event: proxies wait 30 s."""
_LAST_S = 1.0  # to send an error
_MORE = b" ..."  # end of a truncated header


class AnswerSender:
    """Sender of one request's answer. It adds the request id and records the status.

    A large body's bytes are reserved until it is sent. Each piece waits for space in the
    connection's buffer. Cancelling the request ends its answer. A stream of events that ends early
    says why in its last event.
    """

    def __init__(self, send: Send, service: Service, context: Context, kind: str):
        """kind: type of the request's scope, "http" or "websocket"."""
        self._send, self._service, self._context = send, service, context
        self._before = "" if kind == "http" else "websocket."
        self._start: Message | None = None  # headers that wait for their body
        self._last_event: Callable[[ApiError], bytes] | None = None
        self._between = False  # True between two pieces of a stream: an event may follow

    async def send(self, message: Message) -> None:
        """Send one message of the application."""
        kind = message["type"]
        if kind.endswith("http.response.start"):
            self._start = message
        elif kind == "http.response.body":
            await self._send_whole(message.get("body", b""), message.get("more_body", False))
        else:
            if kind == "websocket.accept":
                self._context.status = 101
            await self._begin()
            await self._send(message)

    async def stream(
        self,
        pieces: AsyncGenerator[bytes, None],
        headers: Sequence[tuple[bytes, bytes]],
        last_event: Callable[[ApiError], bytes] | None,
    ) -> None:
        """Send pieces as they arrive. Raises an error before the first one.

        last_event: returns the event of a later error; None: the pieces are not events. A comment
        is sent every WAITING_S until the first event. A slow client slows the request.
        """
        async with aclosing(pieces):
            first = asyncio.ensure_future(anext(pieces))
            try:
                await asyncio.wait([first], timeout=WAITING_S if last_event else None)
                if first.done():
                    first.result()  # raises an error, which still gets a status
                self._start = {"type": "http.response.start", "status": 200, "headers": headers}
                self._last_event = last_event
                try:
                    while not first.done():
                        await self._send_body(b": waiting\n\n", True)
                        await asyncio.wait([first], timeout=WAITING_S)
                    await self._send_body(first.result(), True)
                    async for piece in pieces:
                        await self._send_body(piece, True)
                except Exception as error:
                    refusal = self._service.failed(error, self._context)
                    self._context.refused(refusal)
                    await self.refuse(refusal)
                    return
            finally:
                first.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([first])
        await self._send_body(b"", False)

    async def permit(self, asked: bytes) -> None:
        """Answer a browser's preflight request. asked: names of the request's headers."""
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"600"),
        ]
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body"})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error.

        A begun answer ends with it as an event, or visibly truncated. Does not wait for a client
        that does not read.
        """
        with anyio.move_on_after(_LAST_S):
            await self._refuse(error)

    async def _refuse(self, error: ApiError) -> None:
        if self._context.status:
            if self._before:
                await self._send({"type": "websocket.close", "code": 1011, "reason": error.code})
            elif self._between and self._last_event is not None:
                await self._send_body(self._last_event(error), False)
            return
        body = error.json
        headers = {"content-type": "application/json", **error.headers}
        headers["content-length"] = str(len(body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = f"{self._before}http.response.start"
        await self.send({"type": start, "status": error.status, "headers": raw})
        await self.send({"type": f"{self._before}http.response.body", "body": body})

    async def _begin(self) -> None:
        start, self._start = self._start, None
        if start is None:
            return
        self._context.status = start["status"]
        headers: Sequence[tuple[bytes, bytes]] = start.get("headers", ())
        ms = int(1000 * (time.perf_counter() - self._context.started_s))
        own = [
            (b"x-request-id", self._context.request_id.encode()),
            (b"openai-processing-ms", b"%d" % ms),
        ]
        for rate in self._service.rates.left(self._context.owner) if self._context.owner else ():
            values = rate["limit"], rate["remaining"], f"{rate['reset_seconds']:.3f}s"
            for name, value in zip(_RATES, values, strict=True):
                own.append((f"x-ratelimit-{name}-requests".encode(), str(value).encode()))
        if self._context.warnings:
            own.append((WARNINGS, _header_of(self._context.warnings)))
        if self._context.origin is not None:
            own += [
                (b"access-control-allow-origin", self._context.origin.encode()),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]
        await self._send({**start, "headers": [*headers, *own]})

    async def _send_whole(self, body: bytes, more: bool) -> None:
        """Send a body in memory, reserving its bytes.

        Beyond the limit of bytes a model's answer is still sent; others are refused.
        """
        account = getattr(self._context, "account", None)
        if account is None or len(body) <= PIECE_BYTES:
            return await self._send_body(body, more)
        try:
            (account.add if self._context.method == "POST" else account.hold)(len(body))
        except ApiError as error:
            self._start = None
            self._context.refused(error)
            return await self.refuse(error)
        try:
            await self._send_body(body, more)
        finally:
            account.release(len(body))

    async def _send_body(self, body: bytes, more: bool) -> None:
        await self._begin()
        self._between = False
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            end = start + PIECE_BYTES
            more_body = more or end < len(body)
            piece = {"body": body[start:end], "more_body": more_body}
            await self._send({"type": "http.response.body", **piece})
        self._between = more


def _header_of(warnings: Sequence[str]) -> bytes:
    """Return the warnings as an ASCII header, with other characters escaped.

    If too long, it has the first whole sentences and " ...".
    """
    value = " ".join(warnings).encode("ascii", "backslashreplace")
    if len(value) <= _MOST_HEADER:
        return value
    sentences, end, rest = value[: _MOST_HEADER - len(_MORE)].rpartition(b". ")
    return (sentences + end.rstrip() or rest) + _MORE
