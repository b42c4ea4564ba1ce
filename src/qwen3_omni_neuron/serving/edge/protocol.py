"""uvicorn's HTTP/1.1 and WebSockets, with limits for clients that send or read too slowly.

An override's docstring names in brackets the kinds of hostile requests that it answers.
"""

import asyncio
import math
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from qwen3_omni_neuron.serving.edge.context import BODY_COPIES
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.edge.sending import PIECE_BYTES, SendWatch, pieces_of
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.openai.ids import new_id
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings

# The system's default grows to megabytes, which a client that does not read would fill.
SEND_BUFFER_BYTES = 1 << 17
LINGER_S = 2.0
# An idle connection is kept for longer than any client keeps it (httpx 5 s, load balancers 60,
# Go 90): a client that sends just as its server closes gets no answer. The second value is for
# when more than half of the connections are in use.
KEEP_ALIVE_S, CROWDED_KEEP_ALIVE_S = 120, 5
MOST_HEADERS = 100
MOST_KEPT_BYTES = 1 << 16  # received bytes of incomplete headers, outside a body
STEP_BYTES = 1 << 14  # bytes of a socket that are parsed at a time
# After a step that takes longer than LONG_STEP_S, such as one of tiny frames, the socket waits
# STEP_PAUSES times as long: otherwise other threads get the interpreter lock only every 5 ms.
LONG_STEP_S, STEP_PAUSES = 0.25e-3, 3
BURST_S = 5e-3  # time that messages of one read take before others go on for as long
MOST_FRAMES = 10_000  # frames of one message; even a short one takes a hundred bytes
MOST_PIPELINED = 16  # requests of one connection that wait for an earlier one's answer


class GuardedProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Headers must arrive within header_timeout_s after the connection begins to wait for them. A
    client that stops reading is disconnected, which cancels its request. The bytes, headers and
    pipelined requests that the parser keeps are limited.
    """

    def __init__(self, *, settings: ServerSettings, **others: Any):
        super().__init__(**others)
        self._settings = settings
        self._in_request = False  # True from a request's headers to the end of its body
        self._kept_bytes = 0  # upper bound: bytes since the last headers or part of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._watch: SendWatch

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, or refuse it if too many are open [silent, half-open]."""
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
        """End a connection, and its timers [half-open]."""
        self._stop(self._head_timer)
        self._watch.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client [slow-heads, endless-heads, upgrades]."""
        if self.transport.is_closing():
            return
        self._kept_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._kept_bytes > MOST_KEPT_BYTES:
            self.send_400_response(f"{self._kept_bytes} bytes came without a complete request.")
        elif not self._in_request and not self._answering and self._head_timer is None:
            self._wait_for_head()

    def _parse(self, data: bytes) -> None:
        """Parse bytes of the client. Raises HttpParserError.

        A request that asks for another protocol than WebSocket, such as HTTP/2 (`Upgrade: h2c`), is
        answered over HTTP/1.1, as RFC 9110 allows. The parser skips such a request's body, so the
        request is parsed a second time, without its header Upgrade.
        """
        left = memoryview(data)
        while left:
            try:
                self.parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                left = left[upgrade.args[0] :]
            version = self.parser.get_http_version().encode()
            head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
            head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            # A new parser: the earlier one reads nothing more after `Connection: close`.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join((*head, b"", b"")))

    @property
    def _is_parsed_again(self) -> bool:
        """True in the first of the two passes over a request; see `_parse`."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Drops trailers and headers beyond the gate's limit [endless-heads]."""
        if not self._in_request and len(self.headers) <= MOST_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request. Raises ValueError to close the connection [pipelined, upgrades]."""
        if self._is_parsed_again:
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this server is not a proxy")
            if len(self.headers) > MOST_HEADERS:
                raise ValueError(f"more than {MOST_HEADERS} headers")  # perhaps the body's length
            return
        self._in_request, self._kept_bytes = True, 0
        self._stop(self._head_timer)
        self._head_timer = None
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError(f"{MOST_PIPELINED} requests of one connection wait already")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body [endless-heads]."""
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, not its answer [endless-heads, upgrades]."""
        if self._is_parsed_again:
            return
        self._in_request, self._kept_bytes = False, 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Pass the connection to GuardedSocket, or refuse an unreadable request [socket-paths]."""
        self._in_request = True  # to the connection's end: no other headers are expected
        readable = self.url.isascii()
        if readable:
            self._watch.stop()
            super().handle_websocket_upgrade()
            made = self.transport.get_protocol()
            readable = isinstance(made, GuardedSocket) and made.handshake_initiated
        if not readable:  # otherwise it would wait for other headers for ever
            self._refuse(ApiError(400, "its headers open no WebSocket.", "invalid_http"))

    def on_response_complete(self) -> None:
        """Continue with the next request, or close soon if the body goes on [body-declared].

        Closing at once would hide a refusal from a client that sends its whole body before it
        reads.
        """
        crowded = 2 * len(self.connections) > self._settings.max_connections
        self.timeout_keep_alive = CROWDED_KEEP_ALIVE_S if crowded else KEEP_ALIVE_S
        super().on_response_complete()
        if self._in_request:
            self.loop.call_later(LINGER_S, self._body_is_late, self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP [endless-heads, pipelined]."""
        if self._answering:
            self.transport.abort()  # a refusal would land in the middle of the answer
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
    """One WebSocket. A client that stops reading is disconnected, as over HTTP.

    A message of the client is read when the application has taken the one before, and its bytes
    are counted from the first one on. A large message to the client is sent in frames, each once
    the connection's buffer has space.
    """

    def __init__(self, *, settings: ServerSettings, service: Service, **others: Any):
        super().__init__(**others)
        self._settings, self._service = settings, service
        self._account: Account
        self._coming = self._taken = 0  # bytes of incomplete and of delivered messages
        self._unread = bytearray()  # received bytes that are not parsed yet
        self._refused = False
        self._burst_from_s = math.inf  # when messages began to be there before they were asked for
        self._sending = asyncio.Lock()
        self._ends = False
        self._watch: SendWatch

    @property
    def unsent(self) -> bool:
        """True while its client has not taken all that was sent."""
        return self._watch.unsent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a connection [realtime-unread]."""
        super().connection_made(transport)
        self._watch = SendWatch(self.transport, self.loop, self._settings, lambda: not self._ends)
        address = self.client[0] if self.client else "unknown"
        self._account = self._service.account_of_request(f"sockets of {address}")

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client [socket-fragments]."""
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
        """Parse some of the bytes, and more in later rounds of the event loop.

        A frame may have only a few bytes: all frames of one read could take a second.
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
        """Add a further frame of a message [socket-empty-fragments]."""
        if len(self.frames) >= MOST_FRAMES:
            self._refuse(CloseCode.MESSAGE_TOO_BIG, f"more than {MOST_FRAMES} frames")
        elif not self._refused:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read the answers [socket-pings]."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def send_receive_event_to_app(self) -> None:
        """Deliver a message to the application [socket-fragments]."""
        self._taken, self._coming = self._taken + self._coming, 0
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """Return the next message, and release the ones before [socket-tiny-events].

        Where it is there already, the event loop first has a round for others, and a pause after
        each BURST_S.
        """
        self._account.release(BODY_COPIES * self._taken)
        self._taken = 0
        if self.queue.empty():
            self._burst_from_s = math.inf
        else:
            now = self.loop.time()
            self._burst_from_s = min(self._burst_from_s, now)
            took_s = now - self._burst_from_s
            await asyncio.sleep(took_s if took_s > BURST_S else 0)
            if took_s > BURST_S:
                self._burst_from_s = self.loop.time()
        message = await super().receive()
        if self._unread:  # otherwise the transport continues to read
            self.transport.pause_reading()
        return message

    def _refuse(self, code: int, reason: str) -> None:
        """Close the socket, and discard whatever the client still sends."""
        self._refused = self._ends = self.close_sent = True
        self.frames, self._unread = [], bytearray()
        self.transport.resume_reading()  # needed to receive the client's close
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.loop.call_later(self.close_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, and release its bytes [socket-fragments]."""
        self._account.close()
        self._watch.stop()
        super().connection_lost(exc)
        # The parser is in a reference cycle with its reader, and would keep the client's last
        # message until the next garbage collection.
        self.conn.parser.close()

    def handle_connect(self, event: Request) -> None:
        """Answer the request's headers [socket-paths]."""
        answer = self.conn.accept(event)
        if answer.status_code == 101:
            return super().handle_connect(event)
        self.handshake_initiated = self.handshake_complete = self.close_sent = self._ends = True
        message = (answer.body or b"its headers open no WebSocket.").decode().strip()
        self.transport.write(_refusal(ApiError(answer.status_code, message, "invalid_http")))
        self.transport.close()
        return None

    async def send(self, message: Any) -> None:
        """Send a message whole, after the earlier ones [realtime-retrieve, realtime-unread]."""
        self._ends = self._ends or message["type"] == "websocket.close"
        # After a refusal uvicorn would log that the application has not answered.
        self.handshake_complete |= message["type"] == "websocket.http.response.body"
        text = message.get("text") or ""
        await self._sending.acquire()
        if len(text) <= PIECE_BYTES:
            try:
                return await super().send(message)
            finally:
                self._sending.release()
        # A task, so that a message's frames stay complete if its sender is cancelled.
        task = self.loop.create_task(self._send_frames(text))
        task.add_done_callback(lambda _: self._sending.release())
        self.tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(self.tasks.discard)
        if not await asyncio.shield(task):
            raise ClientDisconnected
        return None

    async def _send_frames(self, text: str) -> bool:
        """Send a message in frames. Returns whether the socket stayed open to the last one.

        text: ASCII, as events are; it is encoded frame by frame, as a copy takes milliseconds.
        """
        send: Any = self.conn.send_text
        for piece, last in pieces_of(text):
            await self.writable.wait()
            if self.disconnected or self.close_sent:
                return False
            try:
                send(piece.encode(), fin=last)
            except InvalidState:  # the client has closed the socket
                return False
            self.transport.write(b"".join(self.conn.data_to_send()))
            send = self.conn.send_continuation
        return True


def _refusal(error: ApiError) -> bytes:
    """Return the complete HTTP answer to an invalid request."""
    body = error.json
    lines = [f"HTTP/1.1 {error.status} Refused", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in error.headers.items()]
    lines += [f"x-request-id: {new_id('req_')}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body
