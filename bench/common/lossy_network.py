"""Two processes, each in a network of its own, and a relay between them that loses packets.

Linux, as root: each process enters a network namespace and opens a tun device in it. What it sends
to the other one is IP packets for this process, which loses some and delays the rest: below TCP,
which sends lost ones again, as over any network. A kernel without netem can do it.
"""

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Addresses of the first and of the second process."""
TUN = Path("/dev/net/tun")
PACKET_BYTES = 1 << 16
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 1, 0x1000
TICK_S = 0.05

Side = Callable[[Connection, Any, float], Any]
"""What one process does: it gets a pipe to the other one, the event that makes the network bad, and
the number of seconds. Its result is sent back. It must be a function of a module."""


class NetworkError(OSError):
    """A network that can't be made, or a process in it that has failed."""


def run_sides(
    sides: tuple[Side, Side], loss: float, jitter_s: float, seconds: float, limit_s: float
) -> list[Any]:
    """Run two functions over a network that is bad as soon as one of them sets the event.

    loss: probability that a packet is lost. jitter_s: longest time that a packet waits. Returns
    both results. Raises NetworkError where this machine has no such network, where a
    function has failed, and after limit_s.
    """
    check()
    context = get_context("spawn")
    bad = context.Event()
    between = context.Pipe()
    pipes, processes = [], []
    relay: Relay | None = None
    try:
        for side, address, other in zip(sides, ADDRESSES, between, strict=True):
            here, there = context.Pipe()
            given = (side, address, there, other, bad, seconds)
            processes.append(context.Process(target=_run, args=given))
            processes[-1].start()
            there.close()
            other.close()
            pipes.append(here)
        _results(pipes, limit_s)  # they are in their networks
        devices = [reduction.recv_handle(pipe) for pipe in pipes]
        relay = Relay(devices, loss, jitter_s, random.Random(1), bad.is_set)
        relay.start()
        return _results(pipes, limit_s)
    finally:
        if relay is not None:
            relay.stop()
        for process in processes:
            process.kill()
            process.join()


def check() -> None:
    """Raise NetworkError where there can be no such network."""
    if sys.platform != "linux" or os.geteuid() or not TUN.exists() or not shutil.which("ip"):
        raise NetworkError(
            f"a network that loses packets needs Linux, root, {TUN} and iproute2's `ip`. "
            "Run this as root, in a container with --cap-add NET_ADMIN --device /dev/net/tun."
        )


class Relay(threading.Thread):
    """Relay of packets between two devices: what is read at one is written to the other.

    Packets wait for a random time, and keep their order, as in the queues of a network.
    """

    def __init__(
        self,
        devices: Sequence[int],
        loss: float,
        jitter_s: float,
        draw: random.Random,
        is_bad: Callable[[], bool],
    ):
        """devices: files of which a read returns one packet; they are closed at the end.

        is_bad: whether packets are lost and wait now.
        """
        super().__init__(name="relay", daemon=True)
        self._devices, self._draw, self._is_bad = devices, draw, is_bad
        self._loss, self._jitter_s = loss, jitter_s
        # What was read at each side: when it is due, and the packet.
        self._waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        self._stopped = threading.Event()

    def run(self) -> None:
        """Pass packets on until `stop`."""
        while not self._stopped.is_set():
            due_s = min((queue[0][0] for queue in self._waiting if queue), default=float("inf"))
            wait_s = min(TICK_S, max(0.0, due_s - time.monotonic()))
            for device in select.select(self._devices, (), (), wait_s)[0]:
                self._take(self._devices.index(device))
            for side, queue in enumerate(self._waiting):
                while queue and queue[0][0] <= time.monotonic():
                    with suppress(OSError):  # a process that has ended has no device any more
                        os.write(self._devices[1 - side], queue.popleft()[1])

    def stop(self) -> None:
        """End the relay, and close the devices."""
        self._stopped.set()
        self.join()
        for device in self._devices:
            os.close(device)

    def _take(self, side: int) -> None:
        packet, queue = os.read(self._devices[side], PACKET_BYTES), self._waiting[side]
        if not self._is_bad():
            queue.append((0.0 if not queue else queue[-1][0], packet))
        elif self._draw.random() >= self._loss:
            due_s = time.monotonic() + self._draw.uniform(0, self._jitter_s)
            queue.append((max(due_s, queue[-1][0]) if queue else due_s, packet))


def _run(
    side: Side, address: str, parent: Connection, other: Connection, bad: Any, seconds: float
) -> None:
    """Enter a network, hand its device to the parent, and send it the function's result."""
    try:
        device = _entered(address)
        parent.send((None, None))
        reduction.send_handle(parent, device, os.getppid())
        parent.send((side(other, bad, seconds), None))
    except Exception as error:
        parent.send((None, f"{type(error).__name__}: {error}"))
        # The end of this process would make the other one fail, too, and hide the cause. The
        # parent kills both.
        with suppress(EOFError):
            parent.recv()


def _entered(address: str) -> int:
    """Enter a network namespace of this process's own. Returns the file of its tun device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace can't be made")
    device = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    for words in (f"address add {address}/24 dev tun0", "link set tun0 up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)
    return device


def _results(pipes: list[Connection], limit_s: float) -> list[Any]:
    """Receive a result of each process. The first error is raised, whoever has it."""
    found: dict[Any, Any] = {}
    until_s = time.monotonic() + limit_s
    while len(found) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in found]
        ready: list[Any] = wait(waiting, until_s - time.monotonic())
        if not ready:
            raise NetworkError(f"the processes were not ready within {limit_s:g} s.")
        for pipe in ready:
            try:
                result, error = pipe.recv()
            except EOFError:
                result, error = None, "it has ended"
            if error is not None:
                raise NetworkError(f"a process has failed: {error}")
            found[pipe] = result
    return [found[pipe] for pipe in pipes]
