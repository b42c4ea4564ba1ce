"""URLs of media: refused unless an operator named the host, and then within limits."""

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from qwen3_omni_neuron.serving.edge.fetching import MOST_FETCHES, Fetcher, is_public
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing.http_server import wait_until

PUBLIC = "93.184.215.14"
HOST = "media.example"


class Pages(http.server.BaseHTTPRequestHandler):
    """A host of media, and of every trick."""

    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("location", self.path[4:])
            self.end_headers()
            return
        if self.path == "/slow":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(100):
                self.wfile.write(b"x: y\r\n")
                time.sleep(0.05)
        content = b"x" * (3000 if self.path == "/large" else 10)
        if self.path == "/missing":
            self.send_response(404)
        else:
            self.send_response(200)
        self.send_header("content-type", "audio/wav")
        if self.path != "/endless":
            length = 50 if self.path == "/short" else len(content)
            self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(content)
        while self.path == "/endless":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Net:
    """Names and addresses as a test has them; a public address leads to the server here."""

    def __init__(self, port: int, answers: Sequence[Sequence[str]] = ((PUBLIC,),)):
        self.port, self.answers = port, list(answers)
        self.resolved: list[str] = []
        self.connected: list[str] = []

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        self.connected.append(address)
        assert is_public(address), f"{address} must never be connected to"
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)


def fetcher(net: Net, timeout_s: float = 5.0) -> Fetcher:
    settings = ServerSettings(media_hosts=(HOST,), media_timeout_s=timeout_s, max_media_bytes=2000)
    return Fetcher(settings, net.resolve, net.connect)


def read(reader: Fetcher, url: str) -> bytes:
    return asyncio.run(reader.fetch(url, "it"))


def test_a_named_host_is_read(port) -> None:
    net = Net(port)
    assert read(fetcher(net), f"http://{HOST}/a.wav?x=1") == b"x" * 10
    assert read(fetcher(net), f"http://{HOST.upper()}/a.wav") == b"x" * 10
    assert net.connected == [PUBLIC, PUBLIC]


def test_nothing_else_is_looked_up_or_connected_to(port) -> None:
    for url in (
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "http://",
        "ftp://media.example/a",
        "gopher://media.example/a",
        "http://other.example/a",
        "http://media.example.other.example/a",
        "http://media.example@other.example/a",
        "http://user:key@media.example/a",
        "http://other.example#@media.example/a",
        "http://media.example:22/a",
        "http://media.example:99999/a",
        "https://169.254.169.254/latest/meta-data",
        "http://[::1]/a",
        "http://127.0.0.1/a",
        "http://localhost/a",
        "http://0x7f000001/a",
        "http://media.example/a b",
        "http://media.example/\r\nx: y",
        "http://media.ex\u00e4mple/a",
        "http://media.example\u3002other.example/a",
    ):
        net = Net(port)
        with pytest.raises(ApiError, match="it is refused"):
            read(fetcher(net), url)
        assert (net.resolved, net.connected) == ([], [])


def test_without_a_named_host_no_url_is_fetched(port) -> None:
    net = Net(port)
    closed = Fetcher(ServerSettings(), net.resolve, net.connect)
    with pytest.raises(ApiError, match="this server may not fetch from its host"):
        read(closed, f"http://{HOST}/a.wav")
    assert net.resolved == []


def test_an_address_that_is_not_public_is_refused(port) -> None:
    for address in (
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0"),
        *("fc00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
        *("fec0::1", "3fff::1", "192.0.0.8", "192.88.99.1", "168.63.129.16", "fd00:ec2::254"),
        *("100.100.100.200", "2002:808:808::", "2001::1", "2001:db8::1", "5f00::1", "4000::1"),
        *("::ffff:8.8.8.8", "64:ff9b:1::1", "100::1", "203.0.113.9", "240.0.0.1", "::", "::1"),
        *("2002:7f00:1::", "ff02::1", "198.18.0.1", "not an address"),
    ):
        assert not is_public(address)
        for answers in ([address], [PUBLIC, address]):
            net = Net(port, [answers])
            with pytest.raises(ApiError, match="not public"):
                read(fetcher(net), f"http://{HOST}/a")
            assert net.connected == []


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, (PUBLIC, "8.8.8.8", "2606:4700::1111")))


def test_a_name_that_changes_its_answer_is_connected_to_where_it_was_checked(port) -> None:
    net = Net(port, [[PUBLIC], ["127.0.0.1"]])
    assert read(fetcher(net), f"http://{HOST}/a") == b"x" * 10
    assert net.resolved == [HOST]
    with pytest.raises(ApiError, match="not public"):
        read(fetcher(net), f"http://{HOST}/a")
    # The first answer is for the redirect's source, the second for its target.
    net = Net(port, [[PUBLIC], ["169.254.169.254"]])
    with pytest.raises(ApiError, match="not public"):
        read(fetcher(net), f"http://{HOST}/to?http://{HOST}/b")
    assert net.connected == [PUBLIC]


def test_a_redirect_is_checked_as_the_first_url_was(port) -> None:
    for target in (
        "http://169.254.169.254/",
        "http://other.example/",
        "file:///etc/passwd",
        "//localhost/a",
        "http://media.example:8080/",
    ):
        net = Net(port)
        with pytest.raises(ApiError, match="it is refused"):
            read(fetcher(net), f"http://{HOST}/to?{target}")
        assert net.connected == [PUBLIC]


def test_redirects_are_followed_three_times(port) -> None:
    net = Net(port)
    assert read(fetcher(net), f"http://{HOST}/to?/to?/a.wav") == b"x" * 10
    with pytest.raises(ApiError, match="more than 3 times"):
        read(fetcher(net), f"http://{HOST}/" + "to?/" * 5 + "a")


def test_size_and_time_are_limited(port) -> None:
    for path, said in (
        ("large", "more than 2000 bytes"),
        ("endless", "more than 2000 bytes"),
        ("missing", "status 404"),
        ("short", "truncated"),
        ("slow", "could not be read within 0.3 s"),
    ):
        start_s = time.monotonic()
        with pytest.raises(ApiError, match=said):
            read(fetcher(Net(port), 0.3 if path == "slow" else 5.0), f"http://{HOST}/{path}")
        assert time.monotonic() - start_s < 4


def test_the_deadline_begins_before_the_look_up_of_the_name(port) -> None:
    ends = threading.Event()

    def resolve(host: str, port: int) -> Sequence[str]:
        ends.wait(30)
        return [PUBLIC]

    settings = ServerSettings(media_hosts=(HOST,), media_timeout_s=0.2)
    with pytest.raises(ApiError, match=r"within 0\.2 s"):
        read(Fetcher(settings, resolve, Net(port).connect), f"http://{HOST}/a")
    ends.set()


def test_a_handshake_has_the_deadline_of_the_whole() -> None:
    """A peer that sends a byte of it now and then would extend a timeout of each read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                sock.sendall(b"\x16\x03\x03\x40\x00")
                for _ in range(200):
                    sock.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        before = threading.active_count()
        with pytest.raises(ApiError, match=r"within 0\.3 s"):
            read(fetcher(Net(listener.getsockname()[1]), 0.3), f"https://{HOST}/a")
        wait_until(lambda: threading.active_count() <= before, 8)


def test_a_fetch_that_gets_no_place_in_time_is_never_made(port) -> None:
    """Otherwise threads of callers that have left would wait, and connect, without bounds."""
    net, free = Net(port), threading.Event()

    def connect(address: str, port: int, timeout_s: float) -> socket.socket:
        net.connected.append(address)
        free.wait(5.0)
        raise TimeoutError

    settings = ServerSettings(media_hosts=(HOST,), media_timeout_s=0.2)
    slow = Fetcher(settings, net.resolve, connect)

    async def many() -> list[bytes | BaseException]:
        fetches = [slow.fetch(f"http://{HOST}/a", "it") for _ in range(3 * MOST_FETCHES)]
        return await asyncio.gather(*fetches, return_exceptions=True)

    errors = asyncio.run(many())
    assert {str(error).count("within 0.2 s") for error in errors} == {1}
    assert [thread.name for thread in threading.enumerate()].count("fetch") >= MOST_FETCHES
    wait_until(lambda: [t.name for t in threading.enumerate()].count("fetch") == MOST_FETCHES)
    free.set()
    wait_until(lambda: "fetch" not in [t.name for t in threading.enumerate()])
    assert len(net.connected) == MOST_FETCHES
