"""The network of bench/webrtc.py: what its relay loses and delays, and real TCP over it."""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from bench.common import lossy_network
from bench.common.lossy_network import ADDRESSES, NetworkError, Relay, run_sides

WAIT_S = 20.0
SIZE = 1 << 16


@contextmanager
def relayed(loss: float, jitter_s: float, bad: bool) -> Iterator[list[socket.socket]]:
    """Two sockets of datagrams with a relay between them."""
    near, far = zip(*(socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(2)), strict=True)
    devices = [made.detach() for made in far]
    relay = Relay(devices, loss, jitter_s, random.Random(0), lambda: bad)
    relay.start()
    for made in near:
        made.settimeout(WAIT_S)
    try:
        yield list(near)
    finally:
        relay.stop()
        for made in near:
            made.close()


def test_packets_pass_both_ways_and_keep_their_order() -> None:
    packets = [b"%d" % number for number in range(50)]
    with relayed(0.0, 0.005, bad=True) as (first, second):
        for packet in packets:
            first.send(packet)
        second.send(b"back")
        assert [second.recv(99) for _ in packets] == packets
        assert first.recv(99) == b"back"


def test_packets_are_lost_from_when_the_network_is_bad() -> None:
    with relayed(1.0, 0.0, bad=False) as (first, second):
        first.send(b"before")
        assert second.recv(99) == b"before"
    with relayed(1.0, 0.0, bad=True) as (first, second):
        first.send(b"after")
        second.settimeout(0.1)
        with pytest.raises(TimeoutError):
            second.recv(99)


def receive(other: Connection, bad: Any, seconds: float) -> int:
    """Receive a stream of TCP while the network is bad. Returns its bytes."""
    with socket.create_server((ADDRESSES[0], 0)) as server:
        other.send(server.getsockname())
        made, _ = server.accept()
        bad.set()
        other.send("bad")
        size = len(made.makefile("rb").read())
        other.send("all")
        return size


def send(other: Connection, bad: Any, seconds: float) -> bool:
    """Send it. Returns whether the other one is reachable over this network alone."""
    address = other.recv()
    with socket.create_connection(address) as made:
        assert other.recv() == "bad"
        made.sendall(bytes(SIZE))
        made.shutdown(socket.SHUT_WR)
        assert other.recv() == "all"  # its network ends with this process
        return made.getsockname()[0] == ADDRESSES[1]


def fail(other: Connection, bad: Any, seconds: float) -> None:
    raise ValueError(f"{seconds:g} is wrong")


def fail_after_it(other: Connection, bad: Any, seconds: float) -> None:
    """Fail as soon as the other process ends. This one's error would be read first."""
    other.recv()


def wait_late(pipes: list[Connection], limit_s: float) -> list[Any]:
    """Wait as a parent that has no processor for a while: more than one pipe may be ready."""
    time.sleep(0.3)
    return wait(pipes, limit_s)


def test_tcp_brings_everything_over_it_and_an_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        lossy_network.check()
    except NetworkError as error:
        pytest.skip(str(error))
    assert run_sides((receive, send), 0.1, 0.005, 0.0, 60.0) == [SIZE, True]
    monkeypatch.setattr(lossy_network, "wait", wait_late)
    with pytest.raises(NetworkError, match="ValueError: 3 is wrong"):
        run_sides((fail_after_it, fail), 0.0, 0.0, 3.0, 60.0)


def test_without_root_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match=r"needs Linux, root, /dev/net/tun and iproute2's `ip`"):
        run_sides((receive, fail), 0.0, 0.0, 0.0, 1.0)
