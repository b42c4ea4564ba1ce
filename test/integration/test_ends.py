"""The command line ends at any moment: by a signal, with its status, without what it has begun."""

import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.cli import main
from testing.http_client import ask
from testing.http_server import wait_until
from testing.repeats import again
from testing.subprocesses import children, lives

END_S = 20.0
BEGUN = """
import sys
from qwen3_omni_neuron import cli
main = cli.main
def begun():
    print("begun", file=sys.stderr, flush=True)
    return main()
cli.main = begun
cli.run()
"""
OWN = ("--threads", "1", "--model", str(SPEAKING_CHECKPOINT))
VERBS = {
    "serve": ("serve", "--port", "0", *OWN),
    "split": ("serve", "--port", "0", "--placement", "split", *OWN),
    "speak": ("speak", "hello", *OWN),
    "compile": ("compile", "--out", "tree", *OWN[2:]),
}
# Moments: the line of stderr before them, the longest time after it, and how many there are.
MOMENTS: dict[str, tuple[tuple[str, float, int], ...]] = {
    "serve": (("begun", 1.0, 1), ("Started server process", 0.3, 1), ('"ready"', 2.0, 2)),
    "split": (("Started server process", 1.5, 1), ('"ready"', 0.5, 1)),
    "speak": (("begun", 1.0, 1), ("whole model", 0.3, 2)),
    "compile": (("begun", 1.0, 1), ("to be compiled", 1.5, 2)),
}
# A fork does not end as the interpreter does, which aborts while a thread is in torch.
COLD = ("begun", "Started server process")
LAST = "RTF"  # in the last line of speak


class Verb:
    """A process of a verb, what it has printed, and the processes that it has started."""

    def __init__(self, verb: str, folder: Path, program: str = BEGUN, *more: str):
        self._serves = VERBS[verb][0] == "serve"
        self.folder, self.lines = folder, list[tuple[str, float]]()
        # A shell that runs the tests in the background has SIGINT ignored, and so would a child.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-c", program, *VERBS[verb], *more],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((line, time.monotonic()))

    @property
    def said(self) -> str:
        return "".join(line for line, _ in self.lines)

    def when(self, text: str) -> float | None:
        """Return the moment at which a text was printed, None if it was not."""
        return next((moment for line, moment in self.lines if text in line), None)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self.when(text) is not None or self.process.poll() is not None, 120)

    def end(self, how: signal.Signals) -> None:
        """Send a signal, and check how the process ends. It may have ended by itself."""
        begun, pid = self.when("begun") is not None, self.process.pid
        started = [p for child in children(pid) for p in (child, *children(child))]
        by_itself = self.process.poll() is not None
        self.process.send_signal(how)
        sent_s = time.monotonic()
        try:
            status = self.process.wait(END_S)
        finally:
            self.process.kill()
            self._reader.join()
        expected = 0 if self._serves else 128 + how
        # It may have said all and have ended by itself as the signal was sent.
        by_itself |= (self.when(LAST) or math.inf) < sent_s + 0.3
        # Before main it may also have gone on to main meanwhile.
        allowed = {0, expected} if by_itself else {expected} if begun else {expected, -how}
        assert status in allowed, (status, self.said)
        if status >= 0:
            assert "Traceback" not in self.said and "Exception" not in self.said, self.said
        assert time.monotonic() - sent_s < END_S
        wait_until(lambda: not any(map(lives, started)))
        assert not [p for p in self.folder.rglob(".*") if p.name != ".lock"]


@pytest.mark.parametrize("verb", [*MOMENTS])
def test_a_verb_ends_by_a_signal_at_any_moment(verb, tmp_path, request) -> None:
    draw, number = random.Random(verb), [*MOMENTS].index(verb)
    for line, most_s, times in MOMENTS[verb]:
        if line not in COLD:  # the imports before it are those of the process it is forked from
            request.getfixturevalue("warm_commands")
        for _ in range(times):
            one = Verb(verb, tmp_path)
            one.wait_for(line)
            time.sleep(draw.uniform(0.0, most_s))
            one.end((signal.SIGTERM, signal.SIGINT)[number % 2])
            number += 1


@pytest.mark.parametrize("verb", ["serve", "compile"])
def test_before_the_first_line_of_main_it_ends_by_the_signal_itself(verb, tmp_path) -> None:
    for number, how in enumerate((signal.SIGTERM, signal.SIGINT) * 2):
        one = Verb(verb, tmp_path)
        time.sleep(0.05 * number)
        one.end(how)


STUCK = """
import sys, threading
from qwen3_omni_neuron import cli
from qwen3_omni_neuron.cli import serve
from qwen3_omni_neuron.helpers.grammars import GrammarPool
from qwen3_omni_neuron.serving import model
from qwen3_omni_neuron.serving.edge import fetching, readers
from testing.scripted_model import ScriptedModel
kind = sys.argv.pop()
def stuck(*_, **__):
    print("stuck", file=sys.stderr, flush=True)
    threading.Event().wait()
scripted = ScriptedModel(["Hello."])
if kind == "reader":
    readers.Readers._call = stuck
elif kind == "fetch":
    fetching.Fetcher._read = stuck
elif kind == "stage":
    scripted.close, model.CLOSE_S = stuck, 0.5
elif kind == "grammar":
    begin = GrammarPool._compile
    def compiling(pool, rules, *given):
        if b"multipleOf" in rules:
            print("stuck", file=sys.stderr, flush=True)
        return begin(pool, rules, *given)
    GrammarPool._compile = compiling
if kind != "grammar":
    serve._load = stuck if kind == "load" else lambda *_: scripted
print("begun", file=sys.stderr, flush=True)
cli.run()
"""


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("kind", ["load", "reader", "fetch", "stage", "grammar"])
def test_a_thread_that_never_returns_does_not_keep_the_server(kind, tmp_path) -> None:
    limits = ("--drain-timeout-s", "0.2", "--allow-media-host", "example.com")
    one = Verb("serve", tmp_path, STUCK, *limits, kind)
    try:
        if kind in ("reader", "fetch", "grammar"):
            one.wait_for('"ready"')
            url = one.said.partition('"url": "')[2].partition('"')[0]
            image = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
            content: Any = [image] if kind == "fetch" else "Hello " * 20_000  # not read in the loop
            asked: Any = {"model": "speaking_checkpoint", "messages": [{"role": "user"}]}
            asked["messages"][0]["content"] = "Hello" if kind == "grammar" else content
            if kind == "grammar":  # takes 4 s of a processor to be refused
                asked["grammar"] = {"json": {"type": "integer", "multipleOf": 2**31}}
            asking = threading.Thread(
                target=lambda: ask(f"{url}/v1/chat/completions", asked), daemon=True
            )
            asking.start()
        one.wait_for('"ready"' if kind == "stage" else "stuck")
    finally:
        one.end(signal.SIGTERM)
    assert "stuck" in one.said


@contextmanager
def shell(command: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A verb of the command line, `qwen`, in the place of a shell, which may limit it first."""
    program = f"{sys.executable} -m qwen3_omni_neuron"
    words = ["bash", "-c", command.replace("qwen", f"exec {program}")]
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    "limited",
    [
        "ulimit -n 20; qwen serve {} <&- >&- 2>&-",
        again("qwen serve {} <&-"),
        again("qwen serve {} >&-"),
        again("qwen serve {} 2>&-"),
        again("ulimit -n 48; qwen serve {} --placement split"),
    ],
)
def test_a_server_without_standard_files_or_with_few_files_answers_and_ends(
    limited, tmp_path
) -> None:
    port = free_port()
    with shell(limited.format(f"--port {port} --threads 1"), tmp_path) as process:

        def ready() -> bool:
            try:
                return ask(f"http://127.0.0.1:{port}/ready").status == 200
            except OSError:
                return False

        wait_until(lambda: ready() or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read().decode()
        assert (process.wait(END_S), "Traceback" in said) == (0, False), said


def test_a_certificate_that_can_not_be_used_is_an_error_that_says_so(tmp_path) -> None:
    from qwen3_omni_neuron.errors import OptionError
    from qwen3_omni_neuron.serving.server import Server
    from qwen3_omni_neuron.serving.settings import ServerSettings
    from testing.scripted_model import ScriptedModel

    (tmp_path / "none.pem").write_text("no certificate")
    for name in ("missing.pem", "none.pem"):
        settings = ServerSettings(port=0, tls_cert=tmp_path / name, tls_key=tmp_path / name)
        with pytest.raises(OptionError, match=rf"{name} can't be used: .* Give a certificate"):
            Server(settings, lambda: ScriptedModel([]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("verb", ["say", "speak"])
def test_bytes_that_are_not_utf8_are_named_in_the_error(verb, tmp_path, capsys) -> None:
    assert main([verb, os.fsdecode(b"a\xff b"), "--out", str(tmp_path / "o.wav")]) == 1
    assert "at character 1 of its 4" in (said := capsys.readouterr().err)
    assert "the byte 0xFF, which is not UTF-8" in said


def test_a_path_that_is_not_utf8_is_written(tmp_path) -> None:
    out = tmp_path / os.fsdecode(b"o\xff.wav")
    assert main(["say", "hello", "--out", str(out), *OWN]) == 0
    assert [*tmp_path.iterdir()] == [out]
