"""Process of a server: listen, load the model, answer, shut down."""

import asyncio
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.engines.process.heap import resident_mb
from qwen3_omni_neuron.errors import ExitStatus, OptionError, OutputError
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.app import make_app
from qwen3_omni_neuron.serving.edge.fetching import Fetcher
from qwen3_omni_neuron.serving.model import FAILED_DRAIN_S
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings

PROGRESS_S = 5.0
MOST_EVENT_BYTES = 24 << 20  # realtime event: 15 MiB of sound in base64, or a large image
# Longer than clients keep connections (httpx 5 s, load balancers 60, Go 90): a request that meets
# its connection's end gets no answer.
KEEP_ALIVE_S = 120
# The system's default grows to megabytes, which a client that does not read fills.
SEND_BUFFER_BYTES = 1 << 17
BACKLOG = 2048  # connections waiting to be accepted
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as IPv6 on a machine without it
_TICK_S = 0.05
_LAST_S = 2.0  # for cancelled requests to end
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Server:
    """HTTP server of one model.

    It listens before the model is loaded: see /ready. After a first SIGTERM, SIGINT, SIGHUP or
    SIGQUIT it completes running requests and refuses new ones; a second one ends all at once. If a
    process or thread of the model dies, it drains and exits with ExitStatus.MODEL_DIED, so that a
    service manager restarts it.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], Qwen3Omni],
        fetcher: Fetcher | None = None,
    ):
        """load: loads the model, in a thread. Raises OptionError for an unusable certificate."""
        self.settings, self._load = settings, load
        self.service = Service(settings, fetcher)
        self.service.model.on_failure = self._on_failure
        self._gate = make_app(self.service)
        self._status = ExitStatus.OK
        self._drain_until_s: float | None = None
        self._load_error: BaseException | None = None
        config = uvicorn.Config(
            self._gate,
            http=partial(_TimedProtocol, header_timeout_s=settings.header_timeout_s),  # type: ignore[arg-type]
            ws="websockets-sansio",
            ws_max_size=MOST_EVENT_BYTES,
            ws_per_message_deflate=False,  # a small message could inflate to any size
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a local client could claim any address
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except OSError as error:  # an ssl.SSLError is one
            raise OptionError(
                f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} can't be used: "
                f"{error}. Give a certificate and its own key, in PEM."
            ) from error
        beside = (self._load_model, self._drained, self.service.model.watch)
        at_end = self.service.decoder.close
        self._uvicorn = _Uvicorn(config, beside, self.stop, at_end)
        self.port = 0
        """The port that the server listens on; 0 before it listens."""

    def run(self) -> int:
        """Serve until a signal or the model's death. Returns the exit status.

        Raises the errors of loading the model, and OutputError if the address can't be bound.
        """
        with self._uvicorn.capture_signals():  # also before and after the event loop
            try:
                sockets = _listening_sockets(self.settings.host, self.settings.port)
                self.port = sockets[0].getsockname()[1]
                self._uvicorn.run(sockets)  # in uvloop's event loop if it is installed
            finally:
                self.service.close()
        if self._load_error is not None:
            raise self._load_error
        return self._status

    async def _load_model(self) -> None:
        with suppress(OSError):  # a request with media tries again
            self.service.decoder.start()
        model, loading = self.service.model, Future[Qwen3Omni]()
        loading.set_running_or_notify_cancel()  # the thread outlives the server's end

        def load() -> None:
            try:
                loading.set_result(self.service.checked(self._load()))
            except BaseException as error:
                loading.set_exception(error)

        def told() -> dict[str, Any]:
            seconds = round(time.monotonic() - start_s, 1)
            return {"model": model.name, "seconds": seconds, "memory_mb": resident_mb()}

        start_s = time.monotonic()
        threading.Thread(target=load, name="load", daemon=True).start()
        waiting = asyncio.wrap_future(loading)
        try:
            while not (await asyncio.wait((waiting,), timeout=PROGRESS_S))[0]:
                logs.event("loading", **told())
        finally:
            waiting.cancel()
        self._load_error = waiting.exception()
        if self._load_error is not None:
            logs.event("load_failed", logging.ERROR, error=str(self._load_error), **told())
            self._uvicorn.should_exit = True
            return
        model.loaded(waiting.result())
        logs.event("ready", **told(), url=self._url())

    async def _drained(self) -> None:
        """End the server once it drains and requests have ended.

        uvicorn uses the remaining time to send answers.
        """
        while True:
            await asyncio.sleep(_TICK_S)
            until_s = self._drain_until_s
            if until_s is None:
                continue
            left_s = until_s - time.monotonic()
            if not self._gate.running or left_s < 0:
                self._uvicorn.config.timeout_graceful_shutdown = max(1, round(left_s))
                self._uvicorn.should_exit = True
                return

    def stop(self) -> None:
        """Act as on a signal, the first or second one. Thread-safe."""
        if self._drain_until_s is not None:
            logs.event("ends_now", running=self._gate.running)
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        self._drain(self.settings.drain_timeout_s)

    def _on_failure(self) -> None:
        self._status = ExitStatus.MODEL_DIED
        if self._drain_until_s is None:
            self._drain(FAILED_DRAIN_S)

    def _drain(self, seconds: float) -> None:
        self.service.model.drain(seconds)
        self._drain_until_s = time.monotonic() + seconds
        logs.event("draining", running=self._gate.running, most_s=seconds)

    def _url(self) -> str:
        scheme = "https" if self.settings.tls_cert else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self.port}"


class _TimedProtocol(HttpToolsProtocol):
    """HTTP connection that ends if a request's headers take too long.

    It overrides public callbacks of asyncio and httptools only.
    """

    def __init__(self, *, header_timeout_s: float, **others: Any):
        super().__init__(**others)
        self._header_timeout_s = header_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._header_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn's server with background tasks, and our handling of signals."""

    def __init__(
        self,
        config: uvicorn.Config,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]],
        on_signal: Callable[[], None],
        at_end: Callable[[], Coroutine[Any, Any, None]],
    ):
        """beside: tasks that run until the server ends. at_end: runs at the end."""
        super().__init__(config)
        self._beside, self._on_signal, self._at_end = beside, on_signal, at_end

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [asyncio.create_task(task()) for task in self._beside]
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            await self._at_end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let cancelled requests send their last bytes, too."""
        await super().shutdown(sockets)
        tasks = set(self.server_state.tasks)
        if self.force_exit:  # otherwise uvicorn cancelled them
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first signal, end at the second. Respect ignored signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[signal.Signals, Any] = dict.fromkeys(_ENDING, self.handle_exit)
        handlers |= dict.fromkeys(_IGNORED, signal.SIG_IGN)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
            del handlers[signal.SIGHUP]
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()


def _listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a socket per address of a host. Raises OutputError if none can be opened."""
    made, reason = list[socket.socket](), "it has no address"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                made.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                reason = str(error.strerror)
        for sock in made:  # connections inherit it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if made:
            return made
    except OSError as error:
        for sock in made:
            sock.close()
        # For a taken port, Python's error repeats the address.
        reason = (error.strerror or str(error)).partition(" (while ")[0]
    raise OutputError(f"can't listen on {host}:{port}: {reason}. Use another --host or --port.")
