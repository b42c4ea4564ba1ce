"""uvicorn's HTTP/1.1 with a time limit for the headers of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedProtocol(HttpToolsProtocol):
    """HTTP connection that is closed if the headers of a request take too long.

    It overrides callbacks of asyncio and of httptools alone.
    """

    def __init__(self, *, header_timeout_s: float, **others: Any):
        super().__init__(**others)
        self._header_timeout_s = header_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(transport)
        self._start_timer()

    def on_message_begin(self) -> None:
        """Begin the headers of a request."""
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """End the headers of a request."""
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._header_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
