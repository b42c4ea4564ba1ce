"""Watch over the bytes that a connection has still to send: who has stopped reading is cut."""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable

from qwen3_omni_neuron.serving.settings import ServerSettings

PIECE_BYTES = 1 << 16
"""Largest part of an answer that is written at a time, and what a connection's buffer holds."""
LOOKS = 4  # within send_timeout_s
# Of the struct of TCP_INFO on Linux: segments not acknowledged at byte 24, bytes that are at 120,
# bytes not yet sent at 144.
_TCP_INFO = struct.Struct("=24xI92xQ16xI")


class SendWatch:
    """Look now and then at what a connection has sent, and cut it where nothing moves.

    A client that reads is not cut while its answer is in progress, however slowly it reads. The
    bytes that still wait when that has ended have request_timeout_s. One that has stopped reading
    has send_timeout_s to go on, and so has one that does not close a connection that was closed
    here. Looks are counted, not seconds: a machine that stands still cuts nobody.
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
        self._still = 0  # looks since anything moved
        self._rest_s = 0.0  # since the answer ended, as long as bytes wait
        transport.set_write_buffer_limits(PIECE_BYTES)  # asyncio's of TLS is 512 KiB
        self._timer = loop.call_later(self._every_s, self._look)

    @property
    def unsent(self) -> bool:
        """True while bytes wait here, or in the system for the client to take them."""
        _, in_system = self._sent()
        return in_system > 0 or self._transport.get_write_buffer_size() > 0

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()
        self._in_progress = bool  # the other one has its connection, in a cycle

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
        """Return the bytes that the client has taken, and whether any wait in the system (> 0).

        Under TLS, and while the system's buffer fills, they tell more than the transport's buffer.
        Zeros where the system does not tell.
        """
        if sys.platform != "linux" or self._socket is None:
            return 0, 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # it is closed
            return 0, 0
        if len(info) < _TCP_INFO.size:
            return 0, 0
        unacked_segments, acked_bytes, unsent_bytes = _TCP_INFO.unpack(info)
        return acked_bytes, unacked_segments + unsent_bytes
