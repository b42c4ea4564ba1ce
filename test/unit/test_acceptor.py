"""Connections that are accepted: TLS handshakes are counted, have a deadline and leave nothing."""

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.serving.edge import acceptor as acceptor_module
from qwen3_omni_neuron.serving.edge.acceptor import Acceptor, listening_sockets
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing.http_server import has_ended, made_certificate

LOOPS = ["asyncio", "uvloop"]
SECONDS = 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made_certificate(tmp_path_factory.mktemp("certificate"))


def open_sockets() -> int:
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder
            found += str(file.readlink()).startswith("socket:")
    return found


def with_loop(kind: str, work: Callable[[], Any]) -> None:
    """Run a coroutine in a loop of a kind."""
    if kind == "uvloop":
        loop = pytest.importorskip("uvloop").new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(work(), 3 * SECONDS))
    finally:
        loop.close()


class Echo(asyncio.Protocol):
    """Protocol that sends back what it gets, and knows its connections."""

    def __init__(self, made: set[Any]):
        self._made = made

    def connection_made(self, transport: Any) -> None:
        self._made.add(self)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self._made.discard(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def holds(predicate: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SECONDS
    while not predicate():
        assert time.monotonic() < end_s, "it did not come to hold"
        await asyncio.sleep(0.01)


@contextmanager
def accepting(
    sockets: list[socket.socket], context: ssl.SSLContext | None, **settings: Any
) -> Iterator[tuple[Acceptor, set[Any]]]:
    made = set[Any]()
    limits = ServerSettings(**settings)
    acceptor = Acceptor(sockets, lambda: Echo(made), made, limits, context)
    try:
        yield acceptor, made
    finally:
        acceptor.close()


def context_of(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


@pytest.mark.parametrize("kind", LOOPS)
def test_handshakes_count_as_connections_and_leave_nothing(
    certificate: tuple[Path, Path], kind: str
) -> None:
    async def work() -> None:
        [listening] = await listening_sockets("127.0.0.1", 0, 200)
        address = listening.getsockname()
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        limits = {"max_connections": 20, "header_timeout_s": 900.0}
        with (
            accepting([listening], context_of(certificate), **limits) as (acceptor, made),
            ExitStack() as clients,
        ):
            reader, writer = await asyncio.open_connection(*address, ssl=trusting)
            await holds(lambda: len(made) == acceptor.open == 1)

            def connect() -> socket.socket:
                return clients.enter_context(closing(socket.create_connection(address)))

            silent = [connect() for _ in range(100)]
            await holds(lambda: sum(map(has_ended, silent)) == 81)
            assert acceptor.open == 20
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            for sock in silent:
                sock.close()
            await holds(lambda: acceptor.open == 1)
            garbage = connect()
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await holds(lambda: has_ended(garbage))
            half = connect()
            await holds(lambda: acceptor.open == 2)
            acceptor.close()
            await acceptor.wait_closed()
            await holds(lambda: has_ended(half))
            with pytest.raises(OSError):
                await asyncio.open_connection(*address)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            await holds(lambda: not made)

    before = open_sockets()
    with_loop(kind, work)
    assert open_sockets() == before


@pytest.mark.parametrize("kind", LOOPS)
def test_a_handshake_has_the_time_of_headers(certificate: tuple[Path, Path], kind: str) -> None:
    async def work() -> None:
        [listening] = await listening_sockets("127.0.0.1", 0, 200)
        context = context_of(certificate)
        with (
            accepting([listening], context, header_timeout_s=1.0) as (acceptor, _),
            ExitStack() as clients,
        ):
            connect = partial(socket.create_connection, listening.getsockname())
            silent = [clients.enter_context(closing(connect())) for _ in range(30)]
            await holds(lambda: acceptor.open > 0)
            await holds(lambda: all(map(has_ended, silent)) and not acceptor.open)
            acceptor.close()
            await acceptor.wait_closed()

    with_loop(kind, work)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_system_without_files_accepts_again_when_it_has_some(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "PAUSE_S", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def work() -> None:
        [listening] = await listening_sockets("127.0.0.1", 0, 10)
        with accepting([listening], None) as (acceptor, made), ExitStack() as stack:
            clients = [stack.enter_context(closing(socket.socket())) for _ in range(3)]
            most = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
            taken = 0
            while taken <= most:  # those below it that are free
                taken = stack.enter_context(closing(listening.dup())).fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
            try:
                for sock in clients:
                    sock.settimeout(SECONDS)
                    sock.connect(listening.getsockname())
                await asyncio.sleep(0.5)  # ten pauses
                assert len(made) < 3
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await holds(lambda: len(made) == 3)
            acceptor.close()
            await acceptor.wait_closed()
            for sock in clients:
                sock.close()
            await holds(lambda: not made)

    with_loop(kind, work)
    told = [record for record in caplog.records if record.getMessage() == "accepts_none"]
    assert len(told) == 1
