"""The good client's key, question and connection: all that a watcher's process has to import."""

import http.client
import ssl
from typing import Any

MODEL = "load"  # the name that `bench.serve_load.server_process` gives
GOOD_KEY, BAD_KEY = "the-key-of-the-good-client", "the-key-of-the-attacker"
QUESTION, ANSWER = "say three five seven red", "three five seven red"


def good_question(stream: bool) -> dict[str, Any]:
    """Return a chat request whose spoken answer is known."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16" if stream else "wav"},
        "stream": stream,
        "temperature": 0,
        "seed": 0,
    }


def connection_of(
    host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float
) -> http.client.HTTPConnection:
    """Return a connection to a server, with its certificate unchecked."""
    if tls is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)


def unchecked() -> ssl.SSLContext:
    """Return a context that accepts any certificate: this one was made a moment ago."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
