"""uvicorn's HTTP/1.1 and WebSockets, with bounds for clients that send or read too slowly."""

import asyncio
import json
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from qwen3_omni_neuron.serving.context import BODY_COPIES
from qwen3_omni_neuron.serving.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.ids import new_id
from qwen3_omni_neuron.serving.quotas import Account
from qwen3_omni_neuron.serving.sending import PIECE_BYTES, SendWatch
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings

# The system would let it grow to megabytes, which a client that does not read would fill.
SEND_BUFFER_BYTES = 1 << 17
LINGER_S = 2.0
# A connection without a request is kept for longer than any client keeps it (httpx 5 s, load
# balancers 60, Go 90): one that sends just when its server closes gets no answer. Unless more than
# half of the connections are taken.
KEEP_ALIVE_S, CROWDED_KEEP_ALIVE_S = 120, 5
MOST_HEADERS = 100
MOST_KEPT_BYTES = 1 << 16  # that neither complete headers nor belong to a body
STEP_BYTES = 1 << 14  # of a socket, that are parsed at a time
# A step of tiny frames takes longer than this, and then its socket waits so many times as long:
# other threads would otherwise get the interpreter lock only every 5 ms.
LONG_STEP_S, STEP_PAUSES = 0.25e-3, 3
MOST_FRAMES = 10_000  # of one message: each takes a hundred bytes, however short it is
MOST_PIPELINED = 16  # requests of one connection that wait for the answer to an earlier one


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    Headers have header_timeout_s to arrive, from when they are waited for. A client that stops
    reading is cut, which cancels its request. What the parser keeps of bytes, headers and requests
    that wait for the one before is bounded.
    """

    def __init__(self, *, settings: ServerSettings, **others: Any):
        super().__init__(**others)
        self._settings = settings
        self._in_request = False  # from a request's headers to the end of its body
        self._kept_bytes = 0  # since the last headers or part of a body, at most
        self._head_timer: asyncio.TimerHandle | None = None
        self._watch: SendWatch

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._watch = SendWatch(transport, self.loop, self._settings, lambda: self._answering)
        if len(self.connections) > self._settings.max_connections:
            most = self._settings.max_connections
            message = f"{most} connections are open, the most that are taken. Try again soon."
            self._refuse(ApiError(503, message, "too_many_connections", retry_after_s=RETRY_S))
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop(self._head_timer)
        self._watch.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self.transport.is_closing():
            return
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MOST_KEPT_BYTES:
            self.send_400_response(f"{self._kept_bytes} bytes came without a complete request.")
        elif not self._in_request and not self._answering and self._head_timer is None:
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Those after a body, and more than the gate refuses, are dropped."""
        if not self._in_request and len(self.headers) <= MOST_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request. Raises ValueError where too many wait, which cuts the connection."""
        self._in_request, self._kept_bytes = True, 0
        self._stop(self._head_timer)
        self._head_timer = None
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError(f"{MOST_PIPELINED} requests of one connection wait already")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, not its answer."""
        self._in_request, self._kept_bytes = False, 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to GuardedSocket, or refuse what that can't read."""
        self._in_request = True  # to its end: no other headers are waited for
        readable = self.url.isascii()
        if readable:
            self._watch.stop()
            super().handle_websocket_upgrade()
            made = self.transport.get_protocol()
            readable = isinstance(made, GuardedSocket) and made.handshake_initiated
        if not readable:  # else it would wait for other headers, for ever
            self._refuse(ApiError(400, "its headers open no WebSocket.", "invalid_http"))

    def on_response_complete(self) -> None:
        """Go on to the next request; where this one's body is still coming, only for a moment.

        A client that sends all of it before it reads would not see a refusal that closes at once.
        """
        crowded = 2 * len(self.connections) > self._settings.max_connections
        self.timeout_keep_alive = CROWDED_KEEP_ALIVE_S if crowded else KEEP_ALIVE_S
        super().on_response_complete()
        if self._in_request:
            self.loop.call_later(LINGER_S, self._body_is_late, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if self._answering:
            self.transport.abort()  # a refusal would stand in the middle of the answer
        else:
            self._refuse(ApiError(400, f"{msg} Headers may have 64 KiB.", "invalid_http"))

    @property
    def unsent(self) -> bool:
        """True while its client has not taken all that was sent."""
        return self._watch.unsent

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _body_is_late(self, cycle: object) -> None:
        if self.cycle is cycle and self._in_request:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(_refusal(error))
        self.transport.close()

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class GuardedSocket(WebSocketsSansIOProtocol):
    """One WebSocket. A client that stops reading is cut, as over HTTP.

    What it sends is read one message at a time, when the one before was taken, and counts as held
    from its first byte on. A large message to it goes out in frames, each once the connection's
    buffer has space.
    """

    def __init__(self, *, settings: ServerSettings, service: Service, **others: Any):
        super().__init__(**others)
        self._settings, self._service = settings, service
        self._account: Account
        self._coming = self._taken = 0  # bytes of messages that come, and that were handed over
        self._unread = bytearray()  # that came, and are not parsed
        self._refused = False
        self._sending = asyncio.Lock()
        self._ends = False
        self._watch: SendWatch

    @property
    def unsent(self) -> bool:
        """True while its client has not taken all that was sent."""
        return self._watch.unsent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection."""
        super().connection_made(transport)
        self._watch = SendWatch(self.transport, self.loop, self._settings, lambda: not self._ends)
        address = self.client[0] if self.client else "unknown"
        self._account = self._service.account_of_request(f"sockets of {address}")

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self._refused:
            return
        try:
            self._account.hold(BODY_COPIES * len(data))
        except ApiError as error:
            self._refuse(CloseCode.TRY_AGAIN_LATER, error.code)
            return
        self._coming += len(data)
        reading = bool(self._unread)
        self._unread += data
        if not reading:
            self._read_step()

    def _read_step(self) -> None:
        """Parse some of the bytes, and the next ones in a later round of the event loop.

        A few bytes are a frame: all that comes at a time would be as many as take a second.
        """
        if self.disconnected:
            return
        start_s = self.loop.time()
        step = bytes(self._unread[:STEP_BYTES])
        del self._unread[:STEP_BYTES]
        super().data_received(step)
        if self._unread and not self._refused:
            self.transport.pause_reading()
            took_s = self.loop.time() - start_s
            self.loop.call_later(STEP_PAUSES * took_s * (took_s > LONG_STEP_S), self._read_step)
        elif not self.read_paused:
            self.transport.resume_reading()

    def handle_cont(self, event: Frame) -> None:
        """Take a further frame of a message."""
        if len(self.frames) >= MOST_FRAMES:
            self._refuse(CloseCode.MESSAGE_TOO_BIG, f"more than {MOST_FRAMES} frames")
        elif not self._refused:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read: answers would fill the memory."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def send_receive_event_to_app(self) -> None:
        """Hand a message over."""
        self._taken, self._coming = self._taken + self._coming, 0
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the next message: those before it were read."""
        self._account.release(BODY_COPIES * self._taken)
        self._taken = 0
        message = await super().receive()
        if self._unread:  # it reads on otherwise
            self.transport.pause_reading()
        return message

    def _refuse(self, code: int, reason: str) -> None:
        """Close the socket, and read no more of what its client still sends."""
        self._refused = self._ends = self.close_sent = True
        self.frames, self._unread = [], bytearray()
        self.transport.resume_reading()  # else the client's close would not be seen
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.loop.call_later(self.close_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._account.close()
        self._watch.stop()
        super().connection_lost(exc)
        # It is in a cycle with what it reads for, and would hold the client's last message until
        # the garbage collector comes.
        self.conn.parser.close()

    def handle_connect(self, event: Request) -> None:
        """Answer the headers."""
        answer = self.conn.accept(event)
        if answer.status_code == 101:
            return super().handle_connect(event)
        self.handshake_initiated = self.handshake_complete = self.close_sent = self._ends = True
        message = (answer.body or b"its headers open no WebSocket.").decode().strip()
        self.transport.write(_refusal(ApiError(answer.status_code, message, "invalid_http")))
        self.transport.close()
        return None

    async def send(self, message: Any) -> None:
        """Send a message after those before it. One that has begun is sent whole."""
        self._ends = self._ends or message["type"] == "websocket.close"
        text = (message.get("text") or "").encode()
        await self._sending.acquire()
        if len(text) <= PIECE_BYTES:
            try:
                return await super().send(message)
            finally:
                self._sending.release()
        # A task, as another frame can't follow the first ones of a message whose sender has ended.
        task = self.loop.create_task(self._send_frames(text))
        task.add_done_callback(lambda _: self._sending.release())
        self.tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(self.tasks.discard)
        if not await asyncio.shield(task):
            raise ClientDisconnected
        return None

    async def _send_frames(self, text: bytes) -> bool:
        """Send a message. Returns whether the socket was open to its end."""
        send: Any = self.conn.send_text
        for start in range(0, len(text), PIECE_BYTES):
            await self.writable.wait()
            if self.disconnected or self.close_sent:
                return False
            end = start + PIECE_BYTES
            try:
                send(text[start:end], fin=end >= len(text))
            except InvalidState:  # the client has closed it
                return False
            self.transport.write(b"".join(self.conn.data_to_send()))
            send = self.conn.send_continuation
        return True


def _refusal(error: ApiError) -> bytes:
    """Return the whole answer to what is no request."""
    body = json.dumps(error.body).encode()
    lines = [f"HTTP/1.1 {error.status} Refused", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in error.headers.items()]
    lines += [f"x-request-id: {new_id('req_')}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body
