"""The model that a server answers with: loading, ready, draining, or gone."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import EngineDiedError
from qwen3_omni_neuron.serving.errors import RETRY_S, ApiError

Result = TypeVar("Result")
Request = TypeVar("Request", bound="Closing")
State = Literal["loading", "ready", "draining", "failed"]
LOADING_RETRY_S = 10
_MB = 1e6


class Closing(Protocol):
    """A request that has started: a stream, or what holds one."""

    def close(self) -> None:
        """Cancel it."""


class ServedModel:
    """A model, which may still be loading, and the threads that read requests for it.

    state: "loading" until `loaded`; "draining" once no new request is taken; "failed" where a
    process of the model has died, which nothing but a new start can mend. on_failure: called once,
    in the event loop, when that is noticed. Only the event loop's thread changes the fields.
    """

    def __init__(self, name: str, threads: int):
        self.name, self.created = name, time.time()
        self.omni: Qwen3Omni | None = None
        self.state: State = "loading"
        self.on_failure: Callable[[], None] | None = None
        self._pool = ThreadPoolExecutor(threads, "serving")

    @property
    def ready(self) -> bool:
        """True where requests are answered."""
        return self.state == "ready"

    def loaded(self, omni: Qwen3Omni) -> None:
        """Take the model, and requests from now on."""
        self.omni = omni
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Take no more requests."""
        if self.state != "failed":
            self.state = "draining"

    def noticed(self, error: BaseException) -> None:
        """Look at an error that ended a request: it may be the end of the model."""
        if isinstance(error, EngineDiedError) and self.state != "failed":
            self.state = "failed"
            if self.on_failure is not None:
                self.on_failure()

    def take(self) -> Qwen3Omni:
        """Return the model. Raises ApiError 503 where it is not ready."""
        if self.omni is not None and self.ready:
            return self.omni
        raise ApiError(
            503,
            f"the server is {self.state}: try again later, or another server.",
            f"model_{self.state}",
            retry_after_s=LOADING_RETRY_S if self.state == "loading" else RETRY_S,
        )

    async def in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in one of the threads. They are few, so that it may have to wait."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(call, *arguments))

    async def start(self, call: Callable[..., Request], *arguments: Any) -> Request:
        """Start a request in a thread: its body is read there, and its media are decoded.

        A task that is cancelled meanwhile leaves no request behind.
        """
        future = self._pool.submit(call, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_started)
            raise

    def close(self) -> None:
        """End the threads, and the model."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.omni is not None:
            self.omni.close()


def _close_started(future: "Future[Any]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def resident_mb() -> int | None:
    """Return the memory of this process in MB, None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    return round(found[0] * 1024 / _MB) if found else None
