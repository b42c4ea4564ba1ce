"""A server over a loaded model, in a thread of this process, on a free port of the loopback."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.fetching import Fetcher
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.settings import ServerSettings

START_S, END_S = 20.0, 20.0


class _Borrowed:
    """A model that stays open when the server closes it."""

    def __init__(self, omni: Qwen3Omni):
        self._omni = omni

    def __getattr__(self, name: str) -> Any:
        return getattr(self._omni, name)

    def close(self) -> None:
        pass


@contextmanager
def serving(omni: Qwen3Omni, fetcher: Fetcher | None = None, **settings: Any) -> Iterator[Server]:
    """Serve a model until the block ends; `url_of` says where."""
    logging.getLogger("qwen3_omni_neuron.serving").setLevel(logging.WARNING)
    server = Server(
        ServerSettings(port=0, **settings),
        lambda: _Borrowed(omni),  # type: ignore[arg-type, return-value]
        fetcher,
    )
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.port > 0 and server.service.model.ready, START_S)
        yield server
    finally:
        server.stop()
        thread.join(END_S)
        if thread.is_alive():
            server.stop()
            thread.join(END_S)
    assert not thread.is_alive(), "the server ends"


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def wait_until(holds: Any, seconds: float = 10.0) -> None:
    """Wait until a function returns true. Raises AssertionError after some seconds."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it did not come to hold"
        time.sleep(0.005)
