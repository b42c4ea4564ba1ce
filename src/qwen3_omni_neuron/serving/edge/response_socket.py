"""WebSocket of /v1/responses: answers each event `response.create` like a POST."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.kept import LastResponse
from qwen3_omni_neuron.serving.openai.bodies import read_json
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.openai.fields import RESPONSES
from qwen3_omni_neuron.serving.service import Service

TOO_LONG, RESTART = 1000, 1012  # WebSocket close codes
PATHS = (RESPONSES, "/v1")  # LiveKit asks for its base URL itself
LAST_RESPONSE = "last_response"
"""Name in a request's scope of its socket's LastResponse."""
_TICK_S = 0.1
_MOST_CANCEL = 1000  # characters of an event that cancels a response


class ResponseSockets:
    """ASGI application for the sockets of all clients. For one event loop."""

    def __init__(self, post: ASGIApp, service: Service):
        """post: answers a POST, with its checks and limits."""
        self._post, self._service = post, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket. Raises ApiError before it is open."""
        service, owner = self._service, scope["context"].owner
        answer: AnswerSender = scope["answer"]
        if service.model.sessions_end_in_s is not None:
            message = "the server ends: open the socket again."
            raise ApiError(503, message, "model_draining", retry_after_s=RETRY_S)
        account = service.account_of_session(owner)
        with service.sessions.place(owner):
            await receive()  # the message "websocket.connect"
            await answer.send({"type": "websocket.accept"})
            asked = {**scope, "type": "http", "method": "POST", "scheme": "http"}
            asked |= {"path": RESPONSES, "raw_path": RESPONSES.encode()}
            asked[LAST_RESPONSE] = LastResponse(account)
            try:
                await _Socket(self._post, service, asked, receive, send).serve()
            finally:
                account.close()


class _Socket:
    """One open socket. _next: the client's next message."""

    def __init__(self, post: ASGIApp, service: Service, asked: Scope, receive: Receive, send: Send):
        """asked: scope of the POST that each event becomes."""
        self._post, self._service, self._asked = post, service, asked
        self._receive, self._raw_send = receive, send
        self._next: asyncio.Future[Message] = asyncio.ensure_future(receive())
        self._expires_s = time.monotonic() + service.settings.max_realtime_s

    async def serve(self) -> None:
        try:
            while True:
                await asyncio.wait([self._next], timeout=_TICK_S)
                if self._next.done():
                    message = self._next.result()
                    if message["type"] == "websocket.disconnect":
                        return None
                    self._next = asyncio.ensure_future(self._receive())
                    if not _cancels(message):  # the response has ended meanwhile
                        await self._answer(message.get("text") or "")
                elif self._service.model.sessions_end_in_s is not None:
                    return await self._close(RESTART, "the server ends")
                elif time.monotonic() > self._expires_s:
                    return await self._close(TOO_LONG, "session_expired")
        finally:
            self._next.cancel()

    async def _answer(self, text: str) -> None:
        """Answer an event like the body of a POST."""
        bodies = [text.encode("utf-8", "surrogatepass")]
        status, left, first, sent_events = 200, b"", b"", 0
        cancelled = False

        async def received() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.wait([self._next])
            nonlocal cancelled
            cancelled = _cancels(self._next.result())
            if cancelled:
                self._next = asyncio.ensure_future(self._receive())
            elif self._next.result()["type"] != "websocket.disconnect":
                await asyncio.Future()  # the next event waits for the end of this one
            return {"type": "http.disconnect"}

        async def sent(message: Message) -> None:
            nonlocal status, left, first, sent_events
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            left += message.get("body", b"")
            if status == 200:
                *events, left = left.split(b"\n\n")
                for event in events:
                    data = event.partition(b"data: ")[2]
                    first, sent_events = first or data, sent_events + 1
                    await self._send(data)
            elif not message.get("more_body"):
                await self._send(to_json({"type": "error", "status": status} | read_json(left, "")))

        await self._post({**self._asked}, received, sent)
        if cancelled and first:
            response = read_json(first, "event")["response"] | {"status": "cancelled"}
            end = {"type": "response.incomplete", "sequence_number": sent_events}
            await self._send(to_json({**end, "response": response}))
        elif cancelled:
            error = ApiError(400, "the response was cancelled before it began.", "cancelled")
            await self._send(to_json({"type": "error", "status": error.status} | error.body))

    async def _send(self, event: bytes) -> None:
        with suppress(OSError):  # the client has left, which `received` finds out
            await self._raw_send({"type": "websocket.send", "text": event.decode()})

    async def _close(self, code: int, reason: str) -> None:
        message: dict[str, Any] = {"type": "websocket.close", "code": code, "reason": reason}
        with suppress(OSError):
            await self._raw_send(message)


def _cancels(message: Message) -> bool:
    text = message.get("text") or ""
    if len(text) > _MOST_CANCEL:
        return False
    with suppress(ApiError):
        event = read_json(text.encode("utf-8", "surrogatepass"), "event")
        return isinstance(event, dict) and event.get("type") == "response.cancel"
    return False
