"""A fork server of the decoders whose children do what their job's content says.

Content that begins with FAULT names a fault; any other is decoded as always.
"""

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.helpers import fork_server, media_work, wire

FAULT = b"fault "
MODULE = __name__


def fault(name: str, **fields: object) -> bytes:
    """Return the content of a job that has a fault."""
    return FAULT + json.dumps({"fault": name, **fields}).encode()


def says(*said: bytes, go_on: bool = True, status: int = 0) -> bytes:
    """Return the content of a job whose child sends `said`, and ends with a status.

    go_on: wait for permission after each.
    """
    return fault("says", said=[s.hex() for s in said], go_on=go_on, status=status)


def main(control: int, setup: int, parent: int) -> None:
    """Serve until the pool disconnects."""
    fork_server.serve(control, setup, parent, media_work.NICENESS, prepare)


def prepare(setup: int) -> fork_server.Run:
    """Load the codecs; return what a child does."""
    media_work.prepare(setup)
    return run


def run(channel: wire.Channel, result: int) -> None:
    """Do what a job's content says."""
    _, data = job = channel.job()
    if not data.startswith(FAULT):
        channel.job = lambda: job  # type: ignore[method-assign]
        media_work.run(channel, result)
        return
    wanted = json.loads(data[len(FAULT) :])
    kind = wanted["fault"]
    if kind == "says":
        for said in wanted["said"]:
            channel._connection.sendall(bytes.fromhex(said))
            if wanted["go_on"]:
                channel.receive(1)
        os._exit(wanted["status"])
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "cut":  # truncates its result, after allocating all of it
        channel.send(wire.MEASURED, 1.0, 0, 64000)
        channel.receive(1)
        channel.send(wire.HOLDS, 0, 0, 0, 16000)
        channel.receive(1)
        os.ftruncate(result, 100)
    elif kind == "deaf":  # it does not end, nor listen
        channel._connection.shutdown(socket.SHUT_RDWR)
        time.sleep(600)
    elif kind == "family":  # starts a process that outlives it
        pid = os.fork()
        if not pid:
            time.sleep(600)
        channel.send(wire.ERROR, text=f"AudioError\n{pid}")
    elif kind == "report":
        channel.send(wire.ERROR, text="AudioError\n" + json.dumps(_state()))
    else:
        _harm_itself(kind, wanted)


def _harm_itself(kind: str, wanted: dict[str, Any]) -> None:
    if kind == "signal":
        os.kill(os.getpid(), wanted["number"])
    elif kind == "memory":
        bytearray(wanted["size"])
    elif kind == "busy":
        while True:
            pass
    else:
        raise ValueError(kind)


def _state() -> dict[str, object]:
    limits = ("AS", "CPU", "CORE", "FSIZE", "NOFILE", "NPROC")
    status = Path("/proc/self/status").read_text()
    return {
        "torch": "torch" in sys.modules,
        "threads": threading.active_count(),
        "nice": os.nice(0),
        "own session": os.getsid(0) == os.getpid(),
        "no new privileges": "NoNewPrivs:\t1" in status,
        "files": len(list(Path("/proc/self/fd").iterdir())) - 1,
        "ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        "limits": {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}"))[0] for n in limits},
        "mapped": int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(),
    }
