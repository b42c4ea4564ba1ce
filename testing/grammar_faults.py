"""A fork server of grammars whose children fail at the tokens of chosen words."""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from qwen3_omni_neuron.helpers import fork_server, grammar_work, wire

MODULE = __name__
FAULTS = ("crash", "slow", "deaf", "twice", "stop")
"""Words: a grammar whose regex begins with one has that fault from its second token on."""


def main(control: int, setup: int, parent: int) -> None:
    """Serve until the pool disconnects."""
    grammar_work.Matcher = FaultyMatcher  # type: ignore[misc]
    fork_server.serve(control, setup, parent, grammar_work.NICENESS, grammar_work.prepare)


class FaultyMatcher(grammar_work.Matcher):
    """A reply's place in a grammar that may have a fault."""

    _count = 0

    def step(self, tokens: Sequence[int], left: int) -> bool:
        goes_on = super().step(tokens, left)
        self._count += len(tokens)
        begin = bytes(self._compiled.compute_ff_bytes()).decode()
        fault = next((f for f in FAULTS if begin.startswith(f)), None)
        if fault is None or self._count < 2:
            return goes_on
        channel: Any = sys._getframe(1).f_locals["channel"]
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "twice":
            channel._connection.sendall(2 * wire.packed(wire.MASK, 0.0))
        elif fault == "deaf":
            channel._connection.shutdown(socket.SHUT_RDWR)
            time.sleep(600)
        else:
            end_s = time.process_time() + 0.1
            while time.process_time() < end_s:
                pass
        return goes_on
