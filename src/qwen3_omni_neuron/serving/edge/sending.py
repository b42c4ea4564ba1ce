"""Bytes that a connection sends: large ones in pieces, and a watch over those not sent yet."""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from qwen3_omni_neuron.serving.settings import ServerSettings

Data = TypeVar("Data", bytes, str)
PIECE_BYTES = 1 << 16
"""Largest part of an answer that is written at a time, and size of a connection's buffer."""
LOOKS = 4  # checks within send_timeout_s
# Fields of TCP_INFO on Linux: unacknowledged segments at byte 24, acknowledged bytes at byte 120,
# bytes not yet sent at 144.
_TCP_INFO = struct.Struct("=24xI92xQ16xI")


def pieces_of(data: Data) -> Iterator[tuple[Data, bool]]:
    """Yield the pieces that are written at a time, and whether each is the last one.

    data: bytes, or ASCII text. The writer waits before each piece until the connection's buffer has
    space.
    """
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield data[start:end], end >= len(data)


class SendWatch:
    """Check regularly what a connection has sent, and abort it if it makes no progress.

    A client that reads, however slowly, stays connected while its answer is in progress. After the
    answer's end, the remaining bytes have request_timeout_s. A client that has stopped reading has
    send_timeout_s to continue, and so has one that does not close a connection that was closed
    here. Checks are counted, not seconds: a suspended machine disconnects nobody.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        settings: ServerSettings,
        in_progress: Callable[[], bool],
    ):
        self._transport, self._loop, self._in_progress = transport, loop, in_progress
        self._socket = transport.get_extra_info("socket")
        self._every_s = settings.send_timeout_s / LOOKS
        self._most_s = settings.request_timeout_s
        self._seen = (0, 0, 0)
        self._still = 0  # checks since the last progress
        self._rest_s = 0.0  # seconds since the answer ended, while bytes wait
        transport.set_write_buffer_limits(PIECE_BYTES)  # asyncio's default for TLS is 512 KiB
        self._timer = loop.call_later(self._every_s, self._look)

    @property
    def unsent(self) -> bool:
        """True while bytes wait here, or in the system for the client to take them."""
        _, in_system = self._sent()
        return in_system > 0 or self._transport.get_write_buffer_size() > 0

    def stop(self) -> None:
        """Stop the checks."""
        self._timer.cancel()
        self._in_progress = bool  # breaks the reference cycle with the connection

    def _look(self) -> None:
        waiting = self._transport.get_write_buffer_size()
        seen = waiting, *self._sent()
        closing = self._transport.is_closing()
        waits = waiting > 0 or closing
        rests = waits and (closing or not self._in_progress())
        self._still = self._still + 1 if waits and seen == self._seen else 0
        self._rest_s = self._rest_s + self._every_s if rests else 0.0
        self._seen = seen
        if self._still >= LOOKS or self._rest_s > self._most_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._every_s, self._look)

    def _sent(self) -> tuple[int, int]:
        """Return the acknowledged bytes, and a number > 0 if any wait in the system.

        Under TLS, and while the system's buffer fills, they show progress that the transport's
        buffer does not. Zeros if the system does not report them.
        """
        if sys.platform != "linux" or self._socket is None:
            return 0, 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # the socket is closed
            return 0, 0
        if len(info) < _TCP_INFO.size:
            return 0, 0
        unacked_segments, acked_bytes, unsent_bytes = _TCP_INFO.unpack(info)
        return acked_bytes, unacked_segments + unsent_bytes
