"""A server over a loaded model, in a thread of this process, on a free port of the loopback."""

import logging
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.errors import ClosedError
from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.serving.edge.fetching import Fetcher
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing.subprocesses import wait_until  # noqa: F401, for who takes it from here

END_S = 20.0


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
    with ThreadPoolExecutor(1, "server") as pool:
        running = pool.submit(server.run)
        try:
            while not (server.port and server.service.model.ready):
                if wait((running,), 0.05).done:
                    running.result()
                    raise ClosedError("the server ended before its model was ready.")
            yield server
        finally:
            server.stop()
            if wait((running,), END_S).not_done:
                server.stop()
            running.result()


def url_of(server: Server, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.port}"


def client_of(server: Server, key: str = "none") -> OpenAI:
    """Return OpenAI's client of a server, without retries."""
    return OpenAI(base_url=f"{url_of(server)}/v1", api_key=key, max_retries=0, timeout=60)


def made_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for the loopback address, and its key. Skips a test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not on PATH")
    key, cert = folder / "key.pem", folder / "cert.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    request += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*request, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def same_sound(given: bytes | NDArray[Any], samples: NDArray[np.float32]) -> None:
    """Assert that 16-bit samples equal these, up to the rounding that chunk sizes cause."""
    if isinstance(given, bytes):
        given = np.frombuffer(given, "<i2")
    wanted = np.frombuffer(pcm16(samples), "<i2")
    assert len(given) == len(wanted)
    assert np.abs(given.astype(int) - wanted).max() <= 2
