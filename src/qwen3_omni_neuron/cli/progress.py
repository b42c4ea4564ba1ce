"""Progress on stderr: a bar on a terminal, and elsewhere a line now and then."""

import sys
from collections.abc import Mapping
from typing import Any

from qwen3_omni_neuron.cli.parsing import CommandParser

REDRAW_S, LINE_S = 0.1, 30.0
_LINE = "{desc}{n_fmt}{unit} of {total_fmt}{unit} after {elapsed}"  # "?" for an unknown total


class _Lines:
    """File for tqdm, of which each redraw that shows something new becomes a line of stderr."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        """Write what is drawn, without the movements of a terminal's cursor."""
        drawn = text.strip("\r\n ")
        if drawn not in ("", self._last):
            self._last = drawn
            print(drawn, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def add_quiet(parser: CommandParser) -> None:
    """Add --quiet to a verb that shows its progress."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def bar_settings(quiet: bool) -> Mapping[str, Any]:
    """Return arguments of tqdm for a bar that is drawn so, or not at all."""
    if quiet or sys.stderr.isatty():
        return {"file": sys.stderr, "mininterval": REDRAW_S, "disable": quiet}
    return {"file": _Lines(), "mininterval": LINE_S, "maxinterval": LINE_S, "bar_format": _LINE}
