"""The HTTP client of tests and benchmarks: whole answers, and answers in their parts.

`testing.raw_http` sends what no client may send. A test of OpenAI's client asks with that one.
"""

import json
import secrets
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Answer:
    """A whole answer. headers: by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HttpClient:
    """A connection to a server, opened by its first request and kept. Use it in a `with` block.

    url: the server's, and what all paths begin with. key: sent with each request. source: own
    address. tls: None for a context that accepts any certificate.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        source: str | None = None,
        timeout_s: float = 120.0,
        tls: ssl.SSLContext | None = None,
    ):
        parts = urlsplit(url)
        how: dict[str, Any] = {"timeout": timeout_s}
        how["source_address"] = None if source is None else (source, 0)
        self._connection = (
            HTTPSConnection(parts.netloc, context=tls or unchecked(), **how)
            if parts.scheme == "https"
            else HTTPConnection(parts.netloc, **how)
        )
        self._start = parts._replace(scheme="", netloc="").geturl()
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        self._connection.close()

    def begin(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> HTTPResponse:
        """Send a request, and return its answer once its headers have come.

        body: bytes, or what is sent as JSON. method: None for POST with a body, GET without one.
        A server may answer and close the connection before it has read a body that is too large.
        """
        more = dict(self._headers)
        if not (body is None or isinstance(body, bytes)):
            body, more = json.dumps(body).encode(), more | JSON
        method = method or ("GET" if body is None else "POST")
        try:
            self._connection.request(method, self._start + path, body, more | dict(headers or {}))
        except (BrokenPipeError, ConnectionResetError):
            if self._connection.sock is None:
                raise
        return self._connection.getresponse()

    def ask(self, path: str, *request: Any, **named: Any) -> Answer:
        """Send a request as `begin` does, and return its whole answer."""
        answer = self.begin(path, *request, **named)
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, headers, answer.read())


def ask(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    **how: Any,
) -> Answer:
    """Send one request over a connection of its own. how: arguments of HttpClient."""
    with HttpClient(url, **how) as client:
        return client.ask("", body, headers, method)


def parts_of(answer: HTTPResponse) -> Iterator[bytes]:
    """Yield a chunked body as it comes: each chunk, or as much of it as has come."""
    return iter(lambda: answer.read1(READ_BYTES), b"")


def form(fields: Mapping[str, bytes], file: bytes, name: str = "a") -> tuple[bytes, dict[str, str]]:
    """Return a form with a file of this name, and the header that says so."""
    mark = secrets.token_hex(16)
    disposition = f"--{mark}\r\ncontent-disposition: form-data; name="
    parts = [f'{disposition}"{k}"\r\n\r\n'.encode() + v + b"\r\n" for k, v in fields.items()]
    parts += [f'{disposition}"file"; filename="{name}"\r\n\r\n'.encode(), file]
    body = b"".join((*parts, f"\r\n--{mark}--\r\n".encode()))
    return body, {"content-type": f"multipart/form-data; boundary={mark}"}


def unchecked() -> ssl.SSLContext:
    """Return a context that accepts any certificate: this one was made a moment ago."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
