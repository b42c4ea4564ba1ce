"""Keys and certificate as docs/deploy.md makes them, and a conversation through each proxy."""

import os
import re
import shutil
import ssl
import stat
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from html import unescape
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import pytest
from openai import OpenAI
from websockets.sync.client import connect

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.serving.edge.keys import read_keys
from qwen3_omni_neuron.serving.endpoints.answer import PieceStream
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import HttpClient
from testing.http_server import serving, url_of, wait_until
from testing.imports import ROOT
from testing.media_cases import QUESTION_WAV
from testing.nginx import NGINX, free_port, nginx_before

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
PROXY = ROOT / "deploy" / "proxy"
SUM_WAV = QUESTION_WAV.with_name("sum.wav")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder in which the page's commands without a server were run."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not on PATH")
    folder = tmp_path_factory.mktemp("made")
    for block in re.findall(r"^```sh\n(openssl.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-ec", block], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def omni() -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT) as made:
        yield made


@pytest.fixture(scope="module")
def server(omni, made) -> Iterator[Server]:
    """A server with the keys and the certificate of the page."""
    files = {"tls_cert": made / "cert.pem", "tls_key": made / "key.pem"}
    with serving(omni, api_keys=read_keys(made / "keys.txt"), **files) as running:
        yield running


def test_the_files_of_the_page_are_for_their_owner_alone(made) -> None:
    (key,) = read_keys(made / "keys.txt")
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    for name in ("keys.txt", "key.pem"):
        assert stat.S_IMODE((made / name).stat().st_mode) == 0o600


def test_clients_know_the_certificate_by_the_ways_that_the_page_names(
    server, made, monkeypatch
) -> None:
    url, cert = url_of(server, "https"), made / "cert.pem"
    strict = ssl.create_default_context(cafile=cert)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
    with HttpClient(url, tls=strict) as client:
        assert client.ask("/ready").json()["status"] == "ready"
    curl = ["curl", "--silent", "--fail", "--cacert", str(cert), f"{url}/ready"]
    assert b'"ready"' in subprocess.run(curl, check=True, capture_output=True).stdout
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    (key,) = read_keys(made / "keys.txt")
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as openai:
        assert len(openai.models.list().data) == 1


def test_the_examples_of_the_page_of_endpoints_run(server, made) -> None:
    """By curl, over TLS. Those that name a stored answer find none."""
    shutil.copy(SUM_WAV, made / "speech.wav")
    (key,) = read_keys(made / "keys.txt")
    url = url_of(server, "https")
    values = {"URL": url, "KEY": key, "CURL_CA_BUNDLE": str(made / "cert.pem")}
    with HttpClient(url) as client:
        page = client.ask("/docs").body.decode()
    examples = [unescape(found) for found in re.findall(r"<pre>(curl .*?)</pre>", page, re.DOTALL)]
    found: dict[str, int] = {}
    for example in examples:
        command = f"{example} -w '\\n%{{http_code}}' --max-time 60"
        asked = subprocess.run(
            ["bash", "-ec", command],
            cwd=made,
            env={**os.environ, **values},
            capture_output=True,
            text=True,
            check=True,
        )
        _, _, status = asked.stdout.rpartition("\n")
        found[example.splitlines()[0].rstrip(" \\")] = int(status)
    wrong = {line: status for line, status in found.items() if status != 200}
    assert {re.sub(r'.*"\$URL(.*)"', r"\1", line): status for line, status in wrong.items()} == {
        "/v1/chat/completions/COMPLETION_ID": 404,
        "/v1/responses/RESPONSE_ID": 404,
        "/v1/responses/RESPONSE_ID/input_items": 404,
        "/v1/models/NAME": 404,
    }
    assert len(found) == len(examples) > 15
    assert (made / "answer").stat().st_size > 1000


@contextmanager
def slow_server(omni: Qwen3Omni) -> Iterator[tuple[Server, Event]]:
    """Serve a model, and a stream at /slow that goes on after its first piece once it may."""
    goes_on = Event()
    with serving(omni, api_keys=("key",)) as server:

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"data: first\n\n"
            while not goes_on.is_set():
                await anyio.sleep(0.01)
            yield b"data: last\n\n"

        async def slow() -> PieceStream:
            return PieceStream(pieces())

        app: Any = server._gate._app
        app.add_api_route("/slow", slow)
        yield server, goes_on


@contextmanager
def caddy(url: str, folder: Path, _: tuple[Path, Path]) -> Iterator[str]:
    """Run Caddy by our configuration, by HTTP on a free port. Yields its URL."""
    text = (PROXY / "Caddyfile").read_text(encoding="utf-8")
    text = text.replace("{\n\tservers", "{\n\tadmin off\n\tservers", 1)
    (folder / "Caddyfile").write_text(text, encoding="utf-8")
    own = f"http://127.0.0.1:{free_port()}"
    server = url.partition("://")[2]
    environment = {"OMNI_NAME": own, "OMNI_SERVER": server, "HOME": str(folder)}
    config = ["--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    running = subprocess.Popen(
        ["caddy", "run", *config], env={**os.environ, **environment}, stderr=subprocess.DEVNULL
    )
    try:
        yield own
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("proxy", [nginx_before, caddy])
def test_a_proxy_passes_on_streams_sockets_bodies_and_the_end_of_a_client(
    proxy, omni, made, tmp_path
) -> None:
    name = "nginx" if proxy is nginx_before else "caddy"
    if (NGINX if name == "nginx" else shutil.which(name)) is None:
        pytest.skip(f"{name}, which checks deploy/, is not installed")
    with ExitStack() as stack:
        server, goes_on = stack.enter_context(slow_server(omni))
        certificate = made / "cert.pem", made / "key.pem"
        url = stack.enter_context(proxy(url_of(server), tmp_path, certificate))
        trusted = ssl.create_default_context(cafile=certificate[0])

        def answers() -> bool:
            with HttpClient(url, tls=trusted) as client:
                try:
                    return client.ask("/ready").status == 200
                except OSError:
                    return False

        wait_until(answers)
        with HttpClient(url, "key", tls=trusted) as client:
            # The first piece comes while the last one is not made yet.
            stream = client.begin("/slow")
            assert stream.read1() == b"data: first\n\n"
            goes_on.set()
            assert stream.read() == b"data: last\n\n"
            # A client that leaves ends its request.
            goes_on.clear()
            assert client.begin("/slow").read1() == b"data: first\n\n"
            assert server._gate.running == 1
            client.close()
            wait_until(lambda: not server._gate.running)
            # A body of nearly the most is refused by the server, for what is in it.
            answer = client.ask("/v1/chat/completions", b" " * (31 << 20))
            assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_json")
        # A page's socket: its Origin is the address that the browser asked.
        with connect(
            f"{url.replace('http', 'ws', 1)}/v1/realtime",
            additional_headers={"Authorization": "Bearer key", "Origin": url},
            ssl=trusted if url.startswith("https") else None,
        ) as page:
            assert "session.created" in str(page.recv(10))
