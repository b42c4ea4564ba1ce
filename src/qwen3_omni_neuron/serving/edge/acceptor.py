"""Listening sockets of a server, and acceptance of connections within its limits."""

import asyncio
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.settings import ServerSettings

PAUSE_S = 1.0  # pause when the system has no files or memory for another connection
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_IN_A_ROW = 32  # connections accepted before other tasks run


async def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return a socket for each address of a host. Raises OSError if there is no address."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made, missing = list[socket.socket](), OSError(f"{host!r} has no address")
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                sock = socket.create_server(address, family=family, backlog=backlog)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error  # such as an IPv6 address on a machine without IPv6
                continue
            sock.setblocking(False)
            made.append(sock)
    except OSError:
        for sock in made:
            sock.close()
        raise
    if not made:
        raise missing
    return made


class Acceptor:
    """An asyncio server whose TLS handshakes count as connections and have a deadline.

    A connection over the limit is closed before its handshake; without TLS the protocol refuses
    it. Made in a task of the one event loop that uses it.
    """

    def __init__(
        self,
        sockets: Collection[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[Any],
        settings: ServerSettings,
        context: ssl.SSLContext | None,
    ):
        """connections: protocols of open connections. context: TLS context, None without TLS."""
        self.sockets = tuple(sockets)
        self._make_protocol, self._connections = make_protocol, connections
        self._most = settings.max_connections
        self._tls: dict[str, Any] = {}
        if context is not None:
            self._tls = {"ssl": context, "ssl_handshake_timeout": settings.header_timeout_s}
            if sys.version_info >= (3, 11):
                # Covers bytes unsent at the close; `SendWatch` cuts clients that do not read.
                self._tls["ssl_shutdown_timeout"] = settings.request_timeout_s
        self._in_handshake = set[asyncio.Protocol]()
        self._tasks = set[asyncio.Task[None]]()
        self._short = False
        for sock in self.sockets:
            self._start(self._accept(sock)).add_done_callback(partial(_close, sock))

    @property
    def open(self) -> int:
        """Number of connections, including those in their handshake."""
        making = sum(protocol not in self._connections for protocol in self._in_handshake)
        return len(self._connections) + making

    def close(self) -> None:
        """Stop accepting, and end the handshakes."""
        self.sockets = ()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the sockets are closed."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        loop, in_a_row = asyncio.get_running_loop(), 0
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _SHORT:
                    await self._pause(error)
                else:  # an error of that connection alone, which is closed by now
                    await asyncio.sleep(0)
                continue
            self._short = False
            if self._tls and self.open >= self._most:
                sock.close()
            else:
                self._begin(sock)
            in_a_row += 1
            if in_a_row % _IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _pause(self, error: OSError) -> None:
        """Leave connections in the system's backlog until others have ended."""
        if not self._short:
            self._short = True
            open_now = self.open
            logs.event("accepts_none", logging.ERROR, error=str(error), connections=open_now)
        await asyncio.sleep(PAUSE_S)

    def _begin(self, sock: socket.socket) -> None:
        protocol = self._make_protocol()
        self._in_handshake.add(protocol)  # before the next one is accepted
        task = self._start(self._connect(protocol, sock))
        task.add_done_callback(partial(self._end, protocol, sock))

    async def _connect(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: protocol, sock, **self._tls)
        except OSError as error:  # the handshake was late, or the client has left
            logs.logger.debug("no connection: %s", error)
            sock.close()

    def _end(
        self, protocol: asyncio.Protocol, sock: socket.socket, task: asyncio.Task[None]
    ) -> None:
        self._in_handshake.discard(protocol)
        if task.cancelled():  # perhaps before it had begun
            sock.close()


def _close(sock: socket.socket, _: asyncio.Task[None]) -> None:
    sock.close()
