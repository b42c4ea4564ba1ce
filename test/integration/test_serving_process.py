"""The server's process: it loads, drains, ends by signals or with its model, and logs."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.events import Status
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of, wait_until
from testing.raw_http import ASKED, LONG, SECONDS, UPGRADE, connected, head_of, rest_of
from testing.repeats import again
from testing.scripted_model import ScriptedModel

STAGES = ("thinker", "talker", "vocoder")


def test_a_draining_server_ends_what_runs_and_takes_no_more(omni) -> None:
    with serving(omni) as server, client_of(server) as client:
        asked: Any = {**LONG, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 60}
        extra = {k: asked.pop(k) for k in list(asked) if k.startswith(("thinker", "talker"))}
        stream = iter(client.chat.completions.create(**asked, extra_body=extra))
        next(stream)
        server.stop()
        with pytest.raises(openai.InternalServerError, match="draining") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        ready = ask(f"{url_of(server)}/ready")
        assert (ready.status, ready.json()["status"]) == (503, "draining")
        assert list(stream)[-1].choices[0].finish_reason
        wait_until(lambda: server._uvicorn.should_exit)


def test_requests_before_the_model_is_loaded_are_told_to_wait_and_how_far_it_is(
    monkeypatch, caplog
) -> None:
    from qwen3_omni_neuron.serving import server as server_module
    from qwen3_omni_neuron.serving.settings import ServerSettings

    monkeypatch.setattr(server_module, "PROGRESS_S", 0.1)
    monkeypatch.setattr(logs.logger, "level", logging.INFO)
    caplog.set_level(logging.INFO)

    def loading() -> list[dict[str, Any]]:
        return [vars(record) for record in caplog.records if record.getMessage() == "loading"]

    go = threading.Event()

    def load() -> Any:
        go.wait(SECONDS)
        raise RuntimeError("no such model")

    server = Server(ServerSettings(port=0, model_name="big"), load)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: server.port)
    with client_of(server) as client:
        assert ask(f"{url_of(server)}/health").status == 200
        told = []
        for _ in range(2):
            ready = ask(f"{url_of(server)}/ready")
            assert ready.status == 503
            told.append(ready.json())
            time.sleep(0.2)
        assert [(one["status"], one["model"]) for one in told] == [("loading", "big")] * 2
        assert told[0]["seconds"] < told[1]["seconds"] < SECONDS
        assert told[0]["memory_mb"] is None or 50 < told[0]["memory_mb"] < 50_000
        wait_until(lambda: len(loading()) > 1)
        first, second, *_ = loading()
        assert first["seconds"] < second["seconds"]
        assert first["model"] == "big"
        with pytest.raises(openai.InternalServerError, match="loading") as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.response.headers["retry-after"] == "10"
    go.set()
    thread.join(SECONDS)
    assert str(failed[0]) == "no such model"


Log = list[dict[str, Any]]


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, Log]]:
    """The command line's server in a process, ready; its URL; and what it logs from then on."""
    words = ["-m", "qwen3_omni_neuron", "serve", "--port", "0", "--threads", "1", *arguments]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines, log = process.stderr, Log()

    def read() -> None:
        log.extend(json.loads(line) for line in lines if line.startswith("{"))

    try:
        for line in lines:
            found = json.loads(line) if line.startswith("{") else {}
            if found.get("event") == "ready":
                break
        threading.Thread(target=read, daemon=True).start()
        yield process, found["url"], log
    finally:
        process.kill()
        process.wait()


def long_stream(url: str) -> tuple[OpenAI, Iterator[Any]]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {k: v for k, v in LONG.items() if k.startswith(("thinker", "talker"))}
    asked: Any = {k: v for k, v in LONG.items() if k not in extra}
    asked["model"] = client.models.list().data[0].id
    extra["talker_max_new_tokens"] = 300
    stream = iter(client.chat.completions.create(**asked, extra_body=extra))
    next(stream)
    return client, stream


# Under nohup a server goes on after SIGHUP.
HANG_UP = signal.SIGHUP if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else signal.SIGQUIT


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("how", [signal.SIGTERM, HANG_UP, again(signal.SIGQUIT)])
def test_a_signal_lets_requests_end(how) -> None:
    with command() as (process, url, _):
        client, stream = long_stream(url)
        with closing(client):
            for ignored in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                process.send_signal(ignored)
            process.send_signal(how)
            *_, last = stream
            assert last.choices[0].finish_reason
        assert process.wait(SECONDS) == 0


@pytest.mark.usefixtures("warm_commands")
def test_a_socket_that_is_refused_or_sends_no_text_is_no_error_of_the_log() -> None:
    with command() as (process, url, log):
        for path, sent, ends in (
            ("/v1/none", b"", b"}"),
            ("/v1/realtime", b"\x81\x81\0\0\0\0\xff", b"\x88\x02" + (1007).to_bytes(2, "big")),
        ):
            with connected(url) as sock:
                sock.sendall(UPGRADE.replace("/v1/realtime", path).encode() + b"\r\n")
                begin = sock.recv(1 << 16)
                sock.sendall(sent)
                assert (begin + rest_of(sock)).endswith(ends), path
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        wait_until(lambda: any("Finished" in line["event"] for line in log))
        assert {line["level"] for line in log} == {"info"}, log


@pytest.mark.usefixtures("slow_steps")
def test_a_second_signal_ends_all_at_once(omni) -> None:
    with serving(omni) as server, connected(url_of(server)) as sock:
        body = json.dumps(LONG).encode()
        sock.sendall(head_of(len(body)) + body)
        sock.recv(100)
        server.stop()
        time.sleep(0.2)
        assert omni.status().running == 1
        server.stop()
        rest_of(sock)
        wait_until(lambda: omni.status().running == 0, 3)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def stage_pids(server: int) -> dict[str, int]:
    """The processes of a server's stages."""
    lines = {p: command_line(p) for p in Path("/proc").iterdir() if p.name.isdecimal()}
    parent = f"parent={server})".encode()
    # They are started in this order.
    pids = sorted(
        int(p.name) for p, line in lines.items() if parent in line and b"process.server" in line
    )
    return dict(zip(STAGES, pids, strict=True))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="no /proc, which Linux has"
)
SPLIT = ("--placement", "split", "--model", str(SPEAKING_CHECKPOINT))
ENDED = "the model has ended. Send the request again later: the server restarts."


@needs_proc
@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("stage", [again("thinker"), "talker", again("vocoder")])
def test_a_stage_that_crashes_fails_its_requests_and_ends_the_server_with_70(stage) -> None:
    """Clients are told nothing of it but that; the log has what the process printed."""
    with command(*SPLIT) as (process, url, log):
        with ExitStack() as clients:
            streams = []
            for _ in range(3):
                client, stream = long_stream(url)
                clients.enter_context(closing(client))
                streams.append(stream)
            os.kill(stage_pids(process.pid)[stage], signal.SIGSEGV)
            for stream in streams:
                with pytest.raises(openai.APIError) as failed:
                    list(stream)
                assert failed.value.message == ENDED
        assert process.wait(SECONDS) == 70
        wait_until(lambda: any(line["event"] == "model_died" for line in log))
        (died,) = (line for line in log if line["event"] == "model_died")
        assert f"The {stage} engine" in died["reason"]
        assert "Fatal Python error: Segmentation fault" in died["reason"]


class DyingModel(ScriptedModel):
    """A model of which a process dies. fault: what its status says then."""

    fault: str | None = None

    def status(self) -> Status:
        return replace(super().status(), fault=self.fault)


def test_a_server_whose_model_dies_while_nothing_runs_says_so() -> None:
    model = DyingModel(["Hello."])
    with serving(model) as server, connected(url_of(server)) as slow:  # type: ignore[arg-type]
        slow.sendall(head_of(10))  # what waits for its body keeps the server until it has drained
        wait_until(lambda: server._gate.running == 1)
        asked = lambda: [ask(f"{url_of(server)}/{path}") for path in ("ready", "health")]  # noqa: E731
        assert [answer.status for answer in asked()] == [200, 200]
        model.fault = "The talker engine (process 7) was ended by SIGSEGV.\nFile /usr/secret.py"
        wait_until(lambda: not server.service.model.ready)
        ready, health = asked()
        assert (ready.status, ready.json()["status"]) == (503, "failed")
        assert (health.status, health.json()["status"]) == (503, "failed")
        assert "process or thread of the model has died" in health.json()["reason"]
        assert b"secret" not in health.body and b"process 7" not in health.body
        with client_of(server) as client, pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.status_code == 503 and "secret" not in str(refused.value)
        slow.close()
        wait_until(lambda: server._uvicorn.should_exit)
    assert server._status == 70


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    from qwen3_omni_neuron.errors import OutputError
    from qwen3_omni_neuron.serving.settings import ServerSettings

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(OutputError, match=r"can't listen on .*: Address already in use\. U"):
            Server(settings, lambda: ScriptedModel([])).run()  # type: ignore[arg-type, return-value]


def test_the_log_has_a_line_a_request_and_content_only_where_it_is_asked_for(omni, caplog) -> None:
    caplog.set_level(logging.INFO)
    for content in (False, True):
        caplog.clear()
        with serving(omni, log_content=content) as server, client_of(server) as client:
            logs.logger.setLevel(logging.INFO)
            answer = client.chat.completions.with_raw_response.create(**ASKED)
            wait_until(lambda: any(r.getMessage() == "request" for r in caplog.records))
        (record,) = [r for r in caplog.records if r.getMessage() == "request"]
        fields = vars(record)
        assert fields["request_id"] == answer.headers["x-request-id"]
        assert (fields["status"], fields["path"]) == (200, "/v1/chat/completions")
        assert fields["text_tokens"] == 2
        assert fields["ttft_s"] > 0
        assert ("Hello" in str(fields.get("question"))) == content
        assert ("answer" in fields) == content
