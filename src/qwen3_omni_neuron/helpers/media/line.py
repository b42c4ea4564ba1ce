"""The pool's end of the connection to one child that decodes."""

import asyncio
import contextlib
import socket
from typing import Any

from qwen3_omni_neuron.helpers.link import resolve
from qwen3_omni_neuron.helpers.media import wire


class Line:
    """The pool's end of the connection to one child."""

    def __init__(self, connection: socket.socket):
        self._loop = asyncio.get_running_loop()
        self._socket, self._received, self._ended = connection, bytearray(), False
        self._waiter: asyncio.Future[None] | None = None
        connection.setblocking(False)
        self._loop.add_reader(connection, self._on_bytes)

    def send(self, data: bytes) -> None:
        """Send a few bytes; do nothing if the child has ended."""
        with contextlib.suppress(OSError):
            self._socket.send(data)

    async def receive(self) -> dict[str, Any] | None:
        """Return the child's next message, None if there will be none.

        Raises BrokenAnswerError.
        """
        while True:
            size = wire.LENGTH.size
            if len(self._received) >= size:
                (length,) = wire.LENGTH.unpack_from(self._received)
                if length > wire.MOST_BYTES:
                    raise wire.BrokenAnswerError("it is too long")
                if len(self._received) >= size + length:
                    data = bytes(self._received[size : size + length])
                    del self._received[: size + length]
                    return wire.unpacked(data)
            if self._ended:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter

    def end(self) -> None:
        """Stop waiting for messages."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._socket)
            self._socket.close()
        resolve(self._waiter, None)

    def _on_bytes(self) -> None:
        try:
            some = self._socket.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        self._received += some
        # An intact child sends one message, and waits.
        if not some or len(self._received) > wire.LENGTH.size + wire.MOST_BYTES:
            self.end()
        else:
            resolve(self._waiter, None)
