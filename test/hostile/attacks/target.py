"""The server that is attacked: its address and keys, its processes, and their memory."""

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test.hostile.attacks.good_client import BAD_KEY, GOOD_KEY, good_question
from testing.command_line import InputError
from testing.http_client import HttpClient
from testing.nginx import NGINX, nginx_before
from testing.server_process import server_process

NO_NGINX = "nginx, which stands before the server, is not installed"
_STAGE = b"qwen3_omni_neuron.engines.process.server"  # in the command line of a stage's process


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a server gives a client: for headers, for a body, and to continue reading."""

    header_s: float = 3.0
    body_s: float = 3.0
    send_s: float = 5.0


SHORT = Deadlines(1.0, 1.0, 2.0)


@dataclass(frozen=True)
class ServerSpec:
    """Server that a kind needs.

    flags: flags of `serve`, beside the deadlines. keys: whether it has keys for the good client and
    for the attacker. proxy: whether attackers reach it through nginx alone. ends_with: its exit
    status after the attack; None: it keeps running. own: no other kind may use it afterwards.
    """

    flags: tuple[str, ...] = ()
    keys: bool = True
    proxy: bool = False
    split: bool = False
    own: bool = False
    ends_with: int | None = None


@dataclass(frozen=True)
class Target:
    """A running server.

    url: its address. front: the address that attackers use. short: whether attacks that take long
    are to be shortened.
    """

    url: str
    front: str
    process: "subprocess.Popen[str]"
    spec: ServerSpec
    short: bool = False

    @property
    def host(self) -> str:
        """Host and port, as an attacker names them."""
        return self.front.partition("://")[2]

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of the server."""
        return SHORT if self.short else Deadlines()

    @property
    def key(self) -> str | None:
        """The attacker's key, where there are keys."""
        return BAD_KEY if self.spec.keys else None

    @property
    def good_key(self) -> str | None:
        """The good client's key, where there are keys."""
        return GOOD_KEY if self.spec.keys else None

    def good_client(self, timeout_s: float = 60.0) -> HttpClient:
        """Return a client with the good client's key."""
        return HttpClient(self.url, self.good_key, timeout_s=timeout_s)

    def stages(self) -> list[int]:
        """Return the processes of the stages, in the order in which they were started."""
        return sorted(pid for pid in family(self.process.pid)[1:] if _STAGE in _command_line(pid))

    def held_mb(self) -> float:
        """Return the memory of the server's processes that is not backed by files, in MiB."""
        return sum(map(_anonymous_kb, family(self.process.pid))) / 1024

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Return status and body of a GET with the good client's key."""
        with self.good_client(timeout_s) as client:
            answer = client.ask(path)
        return answer.status, answer.body

    def counters(self) -> dict[str, float]:
        """Return the figures that are 0 while there are no requests."""
        lines = self.get("/metrics")[1].decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        names = ("requests_in_progress", "slots_used", "queue_length", "realtime_sessions", "_held")
        return {k: float(v) for k, v in values.items() if any(name in k for name in names)}

    def says(self, timeout_s: float = 60.0) -> str:
        """Ask a good question. Returns the answer's text, or the error that came instead."""
        with self.good_client(timeout_s) as client:
            answer = client.ask("/v1/chat/completions", good_question(False))
        if answer.status != 200:
            return f"{answer.status} {answer.json()['error']['code']}"
        return str(answer.json()["choices"][0]["message"]["audio"]["transcript"])


@contextlib.contextmanager
def target_of(
    spec: ServerSpec, checkpoint: str | Path, options: argparse.Namespace, short: bool = False
) -> Iterator[Target]:
    """Start the server of a spec, and end it when the block ends.

    options: dtype, placement and threads. Raises InputError where it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        deadlines = SHORT if short else Deadlines()
        flags = ["--header-timeout-s", f"{deadlines.header_s:g}"]
        flags += ["--body-timeout-s", f"{deadlines.body_s:g}"]
        flags += spec.flags
        if spec.keys:
            file = Path(folder, "keys")
            file.write_text(f"{GOOD_KEY}\n{BAD_KEY}\n", encoding="ascii")
            flags += ["--api-keys", str(file)]
        if spec.split:
            options = argparse.Namespace(**{**vars(options), "placement": "split"})
        with contextlib.ExitStack() as stack:
            url, process = stack.enter_context(server_process(checkpoint, options, flags))
            front = url
            if spec.proxy:
                if NGINX is None:
                    raise InputError(f"{NO_NGINX}. On Debian: apt-get install nginx.")
                made = write_certificate(Path(folder))
                times_s = deadlines.header_s, deadlines.body_s, deadlines.send_s
                front = stack.enter_context(nginx_before(url, Path(folder), made, times_s))
            yield Target(url, front, process, spec, short)


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for this machine and its key. Raises InputError without openssl."""
    if shutil.which("openssl") is None:
        raise InputError("openssl, which makes the certificate, is not on PATH.")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text(encoding="utf-8").rpartition(")")[2]
                parents.setdefault(int(fields.split()[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:  # the list grows meanwhile
        found += parents.get(one, [])
    return found


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _anonymous_kb(pid: int) -> int:
    with contextlib.suppress(OSError):  # the process has ended
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon:", "RssShmem:")))
    return 0


class Peak:
    """The most memory that a target holds while the block runs, in MiB."""

    def __init__(self, target: Target, every_s: float = 0.1):
        self._target, self._every_s = target, every_s
        self._end, self.most_mb = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self._every_s):
            self.most_mb = max(self.most_mb, self._target.held_mb())


def stopped(process: "subprocess.Popen[str]", timeout_s: float) -> int | None:
    """Wait for a process to end. Returns its status, or None if it is still running."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


def waited(holds: Any, timeout_s: float, every_s: float = 0.1) -> bool:
    """Wait until a function returns true. Returns whether it did so in time."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True
