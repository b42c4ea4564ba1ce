"""Requests over HTTP, each over a connection of its own from an address of the loopback."""

import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from bench.soak.gate import Address

REPLY_S = 120.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    body: bytes


def post(
    address: Address,
    path: str,
    body: bytes,
    headers: Mapping[str, str] = JSON,
    source: str = "127.0.0.1",
    timeout_s: float = REPLY_S,
    most: int | None = None,
) -> Reply:
    """Send a request and read its answer. most: bytes after which the client disconnects.

    A server may answer and close the connection before it has read a body that is too large.
    """
    connection = http.client.HTTPConnection(*address, timeout_s, source_address=(source, 0))
    try:
        try:
            connection.request("POST", path, body, dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            if connection.sock is None:
                raise
        answer = connection.getresponse()
        return Reply(answer.status, answer.read(most))
    finally:
        connection.close()


def get(address: Address, path: str) -> bytes:
    connection = http.client.HTTPConnection(*address, REPLY_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def connected(address: Address, source: str, timeout_s: float = REPLY_S) -> socket.socket:
    return socket.create_connection(address, timeout_s, (source, 0))
