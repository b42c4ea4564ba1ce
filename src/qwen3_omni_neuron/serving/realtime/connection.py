"""A session's connection to its client: events out, calls in the session's thread, errors."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Send

from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.realtime import dashscope
from qwen3_omni_neuron.serving.realtime.events import ClientGoneError, is_large, server_event
from qwen3_omni_neuron.serving.service import Service


@dataclass(frozen=True)
class Connection:
    """Connection that all parts of one session share.

    raw_send: sends an ASGI message. pool: the session's thread. is_dashscope: the client speaks
    DashScope's events.
    It has no reference to the session, so that a session is freed when it ends: a reference cycle
    would keep its sound until the next garbage collection, hundreds of sessions later.
    """

    raw_send: Send
    pool: ThreadPoolExecutor
    service: Service
    context: Context
    is_dashscope: bool

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event. Raises ClientGoneError."""
        if self.is_dashscope:
            told = dashscope.told(kind, fields)
            if told is None:
                return
            kind, fields = told
        write = partial(server_event, kind, **fields)
        text = await self.in_thread(write) if is_large(fields) else write()
        try:
            await self.raw_send({"type": "websocket.send", "text": text})
        except OSError as error:  # ASGI's error for a lost connection
            raise ClientGoneError from error

    async def send_error(self, error: ApiError, event_id: str | None = None) -> None:
        """Send an error event. event_id: id of the client's event that caused the error."""
        await self.send("error", error={**error.body["error"], "event_id": event_id})

    async def in_thread(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a function in the session's thread."""
        return await asyncio.wrap_future(self.pool.submit(partial(call, *given, **named)))

    def failed(self, error: Exception) -> ApiError:
        """Return the client's error for an exception; see `Service.failed`."""
        return self.service.failed(error, self.context)
