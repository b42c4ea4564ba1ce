"""A fork server of grammars whose children fail at the tokens of chosen words."""

import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

from qwen3_omni_neuron.helpers import fork_server
from qwen3_omni_neuron.helpers.grammars import server, work

MODULE = __name__
FAULTS = ("crash", "busy", "zero", "stop")
"""Words: a rule whose regex begins with one has that fault from its second token on."""


def main(control: int, vocabulary: int, parent: int) -> None:
    """Serve until the pool disconnects."""
    work._Matcher = FaultyMatcher  # type: ignore[misc]
    prepare = partial(server.prepare, vocabulary)
    fork_server.serve(control, parent, server.NICENESS, prepare)


class FaultyMatcher(work._Matcher):
    """A reply's place in a grammar that may have a fault."""

    def __init__(self, grammar: Any, rows: work.Rows, end_id: int):
        super().__init__(grammar, rows, end_id)
        self._forced = bytes(self._matcher.compute_ff_bytes()).decode()
        self._count = 0

    def step(self, tokens: Sequence[int]) -> int:
        flags = super().step(tokens)
        self._count += len(tokens)
        fault = next((f for f in FAULTS if self._forced.startswith(f)), None)
        if fault is None or self._count < 2:
            return flags
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "zero":
            self._mask[:] = 0
        while fault == "busy":
            pass
        return flags
