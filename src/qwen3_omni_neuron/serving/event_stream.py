"""Answers sent in pieces while they are made: sound, and server-sent events."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.context import Context
from qwen3_omni_neuron.serving.errors import ApiError, api_error_of, error_event
from qwen3_omni_neuron.serving.service import Service


class PieceStream(Response):
    """Response in pieces. An error after the first piece cuts it short, visibly for the client.

    Each piece is sent once the connection's buffer has space: a client that reads slowly slows the
    iterator, and with it the request.
    """

    def __init__(self, pieces: AsyncIterator[bytes], media_type: str | None = None):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces

    def last_piece(self, error: ApiError | None) -> bytes | None:
        """Return the last piece, None to cut the answer. error: the error that ended it."""
        return b"" if error is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        refusal = None
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            service: Service = scope["app"].state.service
            context: Context = scope["context"]
            service.model.noticed(error)
            refusal = api_error_of(error, context.param)
            context.error = refusal.code
            if refusal.code == "internal_error":
                logs.logger.exception("failed", extra={"request_id": context.request_id})
        finally:
            close = getattr(self._pieces, "aclose", None)
            if close is not None:
                await close()
        last = self.last_piece(refusal)
        if last is not None:
            await send({"type": "http.response.body", "body": last, "more_body": False})


class EventStream(PieceStream):
    """Response of server-sent events. An error after the first event is sent as an event."""

    media_type = "text/event-stream"

    def last_piece(self, error: ApiError | None) -> bytes | None:
        """Return the error as an event."""
        return b"" if error is None else error_event(error)


def json_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


async def with_first(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first piece, and return an iterator over all pieces.

    An error before the first piece is raised here, while the answer can still have an error status.
    """
    first = await anext(pieces)

    async def rest() -> AsyncIterator[bytes]:
        try:
            yield first
            async for piece in pieces:
                yield piece
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    return rest()
