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

from qwen3_omni_neuron.helpers import fork_server
from qwen3_omni_neuron.helpers.media import server, wire, work

FAULT = b"fault "
MODULE = __name__


def fault(name: str, **fields: object) -> bytes:
    """Return the content of a job that has a fault."""
    return FAULT + json.dumps({"fault": name, **fields}).encode()


def says(*said: object, go_on: bool = True, status: int = 0) -> bytes:
    """Return the content of a job whose child sends `said`, and ends with a status.

    A string is sent unchanged, anything else as a message; go_on: wait for permission after each.
    """
    return fault("says", said=said, go_on=go_on, status=status)


def main(control: int, parent: int) -> None:
    """Serve until the pool disconnects."""
    fork_server.serve(control, parent, server.NICENESS, prepare)


def prepare() -> fork_server.Run:
    """Load the codecs; return what a child does."""
    server.prepare()
    return run


def run(connection: socket.socket, content: int, result: int) -> None:
    """Do what a job's content says."""
    data = os.pread(content, os.fstat(content).st_size, 0)
    if not data.startswith(FAULT):
        work.run(connection, content, result)
        return
    (length,) = wire.LENGTH.unpack(connection.recv(wire.LENGTH.size))
    connection.recv(length, socket.MSG_WAITALL)
    wanted = json.loads(data[len(FAULT) :])
    kind = wanted["fault"]
    if kind == "says":
        for said in wanted["said"]:
            connection.sendall(said.encode() if isinstance(said, str) else wire.packed(said))
            if wanted["go_on"]:
                connection.recv(1)
        os._exit(wanted["status"])
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "cut":  # truncates its result, after allocating all of it
        connection.sendall(wire.packed({"measured": [1.0, 0, 64000]}))
        connection.recv(1)
        connection.sendall(wire.packed({"holds": vars(wire.Holding(samples=16000))}))
        connection.recv(1)
        os.ftruncate(result, 100)
    elif kind == "deaf":  # it does not end, nor listen
        connection.close()
        time.sleep(600)
    elif kind == "report":
        connection.sendall(wire.packed({"error": ["AudioError", json.dumps(_state())]}))
    else:
        _harm_itself(kind, wanted)


def _harm_itself(kind: str, wanted: dict[str, int]) -> None:
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
    limits = ("AS", "CPU", "CORE", "FSIZE", "NOFILE")
    return {
        "torch": "torch" in sys.modules,
        "threads": threading.active_count(),
        "nice": os.nice(0),
        "files": len(list(Path("/proc/self/fd").iterdir())) - 1,
        "ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        "limits": {n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}"))[0] for n in limits},
        "mapped": int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(),
    }
