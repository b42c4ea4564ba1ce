"""A pool's side of its fork server."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from qwen3_omni_neuron.engines.process.child import OutputTail, start_child
from qwen3_omni_neuron.helpers import orders

logger = logging.getLogger(__name__)
# One thread when it forks, and one malloc arena: each takes 64 MiB of a child's address space.
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "1",
}
END_S = 1.0  # time for the fork server to end its children and itself
_TICK_S = 0.005


class ForkServer:
    """Process of a module whose `main` calls helpers.fork_server.serve.

    files: descriptors that `main` gets after that of the connection. Used by the event loop in
    which it was made. Raises OSError if it can't be started.
    """

    def __init__(self, module: str, files: Sequence[int] = ()):
        self._module = module
        self._loop = asyncio.get_running_loop()
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self._received = bytearray()
        self._output = OutputTail()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_child(
                    module,
                    (theirs.fileno(), *files),
                    self._output,
                    ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                self._socket.close()
                self._output.close()
                raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._on_reports)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True where it accepts no more orders."""
        return self._socket.fileno() < 0

    def fork(
        self, number: int, memory_bytes: int, cpu_s: int, files: Sequence[int]
    ) -> "asyncio.Future[int | None]":
        """Order the fork of a child. files: descriptors that it gets.

        Returns a future of the child's return code, in subprocess's form;
        helpers.orders.NO_FORK if the fork failed, None if the fork server ended first.
        """
        self._exits[number] = exited = self._loop.create_future()
        self._order(orders.ORDER.pack(orders.FORK, number, memory_bytes, cpu_s), files)
        return exited

    def kill(self, number: int) -> None:
        """Kill a job's child, unless it has ended."""
        if number in self._exits:
            self._order(orders.ORDER.pack(orders.KILL, number, 0, 0), ())

    def end(self, why: str | None = None) -> None:
        """End the process at once. why: the reason, for the log."""
        if self.ended:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()  # on Linux its children end with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if why is not None:
            logger.warning("%s %s. %s", self._module, why, self.output())
        self._release()

    async def close(self) -> None:
        """End the process and its children in order, and wait for it."""
        if self.ended:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        end_s = time.monotonic() + END_S
        try:
            while self._process.poll() is None and time.monotonic() < end_s:
                await asyncio.sleep(_TICK_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._release()

    def output(self) -> str:
        """Return the last output of the process and its children, for the log."""
        text = self._output.read()
        return f"The end of its output:\n{text}" if text else "It printed nothing."

    def _order(self, order: bytes, files: Sequence[int]) -> None:
        if self.ended:
            self._release()
            return
        try:
            whole = socket.send_fds(self._socket, [order], files) == len(order)
        except OSError:  # it has ended, or accepts no orders
            whole = False
        if not whole:
            self.end("took no order")

    def _on_reports(self) -> None:
        try:
            some = self._socket.recv(1 << 12)
        except BlockingIOError:
            return
        except ConnectionError:
            some = b""
        if not some:
            self.end("ended by itself")
            return
        self._received += some
        while len(self._received) >= orders.REPORT.size:
            number, status = orders.REPORT.unpack_from(self._received)
            del self._received[: orders.REPORT.size]
            resolve(self._exits.pop(number, None), status)

    def _release(self) -> None:
        """Resolve the futures of all children with None: no report will come."""
        self._output.close()
        exits, self._exits = self._exits, {}
        for exited in exits.values():
            resolve(exited, None)


def resolve(future: "asyncio.Future[Any] | None", value: Any) -> None:
    """Set a future's result, unless there is no future or it has one."""
    if future is not None and not future.done():
        future.set_result(value)
