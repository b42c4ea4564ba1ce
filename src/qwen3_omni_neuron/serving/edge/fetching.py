"""Fetching of media from URLs of allowed hosts at public addresses, within limits."""

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from urllib.parse import SplitResult, urljoin, urlsplit

from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.settings import ServerSettings

Resolver = Callable[[str, int], Sequence[str]]
"""Function (host, port) -> addresses."""
Connector = Callable[[str, int, float], socket.socket]
"""Function (address, port, timeout in seconds) -> connection."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_READ_BYTES = 1 << 16
MOST_FETCHES = 8  # fetches at a time
# Addresses not globally reachable by IANA's special-purpose registries, and multicast; some rows
# include small reachable ranges. `ipaddress`'s tables depend on Python's version.
_NOT_PUBLIC_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata at 100.100.100.200
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's metadata, in no registry
            "169.254.0.0/16",  # link-local; most clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # IETF protocol assignments
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
# Global unicast; the rest is local, multicast, unassigned, or leads to IPv4 addresses
# (::ffff:0:0/96, 64:ff9b::/96 of NAT64).
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # IETF protocol assignments; Teredo, which leads to IPv4 addresses
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which leads to IPv4 addresses
            "3fff::/20",  # documentation
        ),
    )
)


def resolve(host: str, port: int) -> list[str]:
    """Resolve a host by the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to an address."""
    return socket.create_connection((address, port), timeout_s)


def is_public(address: str) -> bool:
    """Return whether an address is not private, local or reserved."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _NOT_PUBLIC_V4)
    return ip in _UNICAST_V6 and not any(ip in network for network in _NOT_PUBLIC_V6)


class Fetcher:
    """Reader of media from URLs.

    Each connection resolves the host once, and connects to a checked address, so that DNS rebinding
    has no effect. Redirects are checked, too.
    """

    def __init__(
        self, settings: ServerSettings, resolver: Resolver = resolve, connector: Connector = connect
    ):
        self._hosts = frozenset(host.lower() for host in settings.media_hosts)
        self._timeout_s, self._redirects = settings.media_timeout_s, settings.media_redirects
        self._most_bytes = settings.max_media_bytes
        self._resolve, self._connect = resolver, connector
        self._places = threading.Semaphore(MOST_FETCHES)

    async def fetch(self, url: str, where: str) -> bytes:
        """Return the content of a URL. Raises ApiError 400.

        Each fetch has its own thread, which a silent name server may block beyond the deadline
        without delaying the caller or the process's end. The deadline includes waiting for a place.
        """
        self.check(url, where)
        end_s = time.monotonic() + self._timeout_s
        done: Future[bytes] = Future()
        done.set_running_or_notify_cancel()  # the thread outlives a caller that stops waiting

        def run() -> None:
            try:
                if not self._places.acquire(timeout=self._timeout_s):
                    raise self._late(where)
                try:
                    done.set_result(self._read(url, where, end_s))
                finally:
                    self._places.release()
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="fetch", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), self._timeout_s)
        except asyncio.TimeoutError:
            raise self._late(where) from None

    def _late(self, where: str) -> ApiError:
        return _refused(where, f"its URL could not be read within {self._timeout_s:g} s")

    def _read(self, url: str, where: str, end_s: float) -> bytes:
        for _ in range(self._redirects + 1):
            parts = self.check(url, where)
            content, next_url = self._get(parts, where, end_s)
            if next_url is None:
                return content
            url = urljoin(url, next_url)
        raise _refused(where, f"its URL redirects more than {self._redirects} times")

    def check(self, url: str, where: str) -> SplitResult:
        """Return a URL's parts. Raises ApiError 400 if it may not be read."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _refused(where, "its URL can't be read") from None
        if parts.scheme not in _PORTS or not host:
            raise _refused(where, "its URL is neither a data URL nor of http or https")
        if host.lower() not in self._hosts:
            raise _refused(where, "this server may not fetch from its host")
        if parts.username is not None or parts.password is not None:
            raise _refused(where, "its URL has a user name or a password")
        if port not in (None, _PORTS[parts.scheme]):
            raise _refused(where, f"its URL has the port {port}, not the scheme's own")
        if any(ord(c) <= 32 or ord(c) >= 127 for c in url):
            raise _refused(where, "its URL has blanks or characters that are not ASCII")
        return parts

    def _get(self, parts: SplitResult, where: str, end_s: float) -> tuple[bytes, str | None]:
        """Return the content, and any redirect's target."""
        host, port = parts.hostname or "", _PORTS[parts.scheme]
        try:
            addresses = list(self._resolve(host, port))
        except OSError as error:
            raise _refused(where, "its host has no address") from error
        if not addresses or not all(map(is_public, addresses)):
            raise _refused(where, "its host has an address that is not public")
        try:
            with (
                self._connect(addresses[0], port, _left(end_s)) as raw,
                _ended_at(end_s, raw),
                _secured(raw, parts) as sock,
            ):
                return self._exchange(sock, parts, where, end_s)
        except (OSError, http.client.HTTPException) as error:  # an ssl.SSLError is an OSError
            if isinstance(error, TimeoutError) or time.monotonic() >= end_s:
                raise self._late(where) from error
            reason = str(error)[:100] or type(error).__name__
            raise _refused(where, f"its host can't be read from ({reason})") from error

    def _exchange(
        self, sock: socket.socket, parts: SplitResult, where: str, end_s: float
    ) -> tuple[bytes, str | None]:
        connection = http.client.HTTPConnection(parts.hostname or "")
        connection.sock = sock
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("GET", path, headers={"Accept": "*/*", "Connection": "close"})
        with connection.getresponse() as response:
            if response.status in _REDIRECTS:
                return b"", response.headers.get("location", "")
            if response.status != http.client.OK:
                raise _refused(where, f"its URL answered with status {response.status}")
            content = bytearray()
            while block := response.read(_READ_BYTES):
                content += block
                if len(content) > self._most_bytes:
                    raise _refused(
                        where, f"it has more than {self._most_bytes} bytes", "media_too_large"
                    )
            if response.length:  # bytes missing when the connection ended
                raise _refused(where, "its content is truncated")
            if time.monotonic() >= end_s:
                raise TimeoutError
            return bytes(content), None


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


@contextlib.contextmanager
def _ended_at(end_s: float, sock: socket.socket) -> Iterator[None]:
    """Shut down a connection at a deadline: a socket's timeout limits single reads."""
    # A TLS connection takes over the socket itself.
    with sock.dup() as other:
        watch = threading.Timer(_left(end_s), _shut_down, (other,))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


def _secured(sock: socket.socket, parts: SplitResult) -> socket.socket:
    if parts.scheme == "http":
        return sock
    return ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _refused(where: str, why: str, code: str = "invalid_media_url") -> ApiError:
    return ApiError(
        400,
        f"{where} is refused: {why}. Send the content itself, as a data URL: "
        "data:TYPE;base64,CONTENT.",
        code,
        where,
    )
