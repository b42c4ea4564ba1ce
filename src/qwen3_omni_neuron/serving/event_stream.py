"""Server-sent events, written as they come."""

from collections.abc import AsyncIterator

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.context import Context
from qwen3_omni_neuron.serving.errors import api_error_of, error_event
from qwen3_omni_neuron.serving.service import Service


class EventStream(Response):
    """Response of server-sent events. An error after the first of them is an event itself.

    Each is sent once the connection's buffer has space: a client that reads slowly holds up the
    iterator, and with it its own request.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes]):
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            service: Service = scope["app"].state.service
            context: Context = scope["context"]
            service.model.noticed(error)
            refusal = api_error_of(error)
            context.error = refusal.code
            if refusal.code == "internal_error":
                logs.logger.exception("failed", extra={"request_id": context.request_id})
            body = error_event(refusal)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            close = getattr(self._pieces, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_first(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first piece, and return all of them.

    What goes wrong before it is raised here, while the answer can still have its own status.
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
