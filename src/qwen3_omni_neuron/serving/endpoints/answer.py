"""The answer to one request: in one message, or in pieces while it is made."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.sending import pieces_of
from qwen3_omni_neuron.serving.openai.errors import ApiError, error_event
from qwen3_omni_neuron.serving.service import Service

EVENTS = "text/event-stream"
"""Media type of server-sent events."""
WARNINGS = b"x-warnings"
"""Header with sentences about files that are not used whole, or not as they are."""
_MOST_HEADER = 2000  # bytes of this header: clients refuse long ones
_MORE = b" ..."  # end of a header that has not all of the warnings


class AnswerSender:
    """Sender of the answer to one request. It adds the request id and records the status.

    A large body is sent in pieces, each once the connection's buffer has space. Until the client
    has taken all but the last piece, the answer is in progress, and cancelling the request ends it.
    """

    def __init__(self, send: Send, service: Service, context: Context, kind: str):
        """kind: type of the request's scope, "http" or "websocket"."""
        self._send, self._service, self._context = send, service, context
        self._before = "" if kind == "http" else "websocket."

    async def send(self, message: Message) -> None:
        """Send one message of the application."""
        if message["type"] == "websocket.accept":
            self._context.status = 101
        elif message["type"].endswith("http.response.start"):
            self._context.status = message["status"]
            headers: Sequence[tuple[bytes, bytes]] = message.get("headers", ())
            own = [(b"x-request-id", self._context.request_id.encode())]
            if self._context.warnings:
                own.append((WARNINGS, _header_of(self._context.warnings)))
            message = {**message, "headers": [*headers, *own]}
        if message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            await self._send(message)

    async def stream(self, pieces: AsyncGenerator[bytes, None], answer: "PieceStream") -> None:
        """Send pieces as they are made. An error before the first one is raised.

        A client that reads slowly slows the generator, and with it the request. An error after the
        first piece is sent as an event, or cuts the answer short, visibly for the client.
        """
        async with aclosing(pieces):
            piece = await anext(pieces)
            start = {"type": "http.response.start", "status": 200, "headers": answer.raw_headers}
            await self.send(start)
            last = b""
            try:
                await self._send_body(piece, True)
                async for piece in pieces:
                    await self._send_body(piece, True)
            except Exception as error:
                refusal = self._service.failed(error, self._context)
                self._context.refused(refusal)
                if answer.media_type != EVENTS:
                    return
                last = error_event(refusal)
        await self._send_body(last, False)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error; if an answer has already begun, leave it cut short."""
        if self._context.status:
            if self._before:
                await self._send({"type": "websocket.close", "code": 1011, "reason": error.code})
            return
        body = error.json
        headers = {"content-type": "application/json", **error.headers}
        headers["content-length"] = str(len(body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = f"{self._before}http.response.start"
        await self.send({"type": start, "status": error.status, "headers": raw})
        end = f"{self._before}http.response.body"
        await self.send({"type": end, "body": body, "more_body": False})

    async def _send_body(self, body: bytes, more: bool) -> None:
        for piece, last in pieces_of(body):
            message = {"type": "http.response.body", "body": piece, "more_body": more or not last}
            await self._send(message)


class PieceStream(Response):
    """Response in pieces, which `AnswerSender.stream` sends: sound, or server-sent events."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str = EVENTS):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces."""
        answer: AnswerSender = scope["answer"]
        await answer.stream(self._pieces, self)


def _header_of(warnings: Sequence[str]) -> bytes:
    """Return the warnings as a header's value: ASCII, with other characters escaped.

    If they are too long, it has the first whole sentences, and ends with " ...".
    """
    value = " ".join(warnings).encode("ascii", "backslashreplace")
    if len(value) <= _MOST_HEADER:
        return value
    sentences, end, rest = value[: _MOST_HEADER - len(_MORE)].rpartition(b". ")
    return (sentences + end.rstrip() or rest) + _MORE


def json_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"
