"""The command line, `qwen3-omni-neuron VERB`."""

import _thread
import errno
import os
import select
import signal
import sys
import time
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from qwen3_omni_neuron.cli.parsing import PROGRAM, refuse_unknown, with_flags
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.engines.process.child import kill_children
from qwen3_omni_neuron.errors import (
    REMOVED_VERBS,
    ExitStatus,
    Qwen3OmniError,
    did_you_mean,
    removed,
)

END_S = 10.0  # time for the verb to clean up after a signal
VERBS = {
    "speak": ("speak", "[text]", "answer a question in text and speech"),
    "say": ("speak", "text", "speak a text"),
    "serve": ("serve", "", "serve HTTP in the shapes of OpenAI's API"),
    "transcribe": ("transcribe", "FILE...", "transcribe sound files"),
    "compile": ("compile", "", "compile a checkpoint for a target"),
    "inspect": ("inspect", "DIR", "describe a compiled tree or a checkpoint"),
    "doctor": ("doctor", "", "report on this machine, to paste into an issue"),
    "verify": ("verify", "", "compare a model with transformers, stage by stage"),
}
"""Verbs: module of `add_VERB`, positional arguments, help."""


def run() -> NoReturn:
    """Run this process's command line, and end the process with its exit status.

    The first SIGTERM or Ctrl-C raises KeyboardInterrupt in the main thread, so that temporary files
    are removed and processes end; later ones are ignored. END_S later the process is ended in any
    case: a thread may be in an endless call.
    """
    status: int = ExitStatus.FAILED
    signals = _Signals(serves=sys.argv[1:2] == ["serve"])
    try:
        _open_standard_files()
        status = main()
    except SystemExit as end:  # from argparse, which has printed why
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a library may have converted KeyboardInterrupt
        if signals.status is None:
            with suppress(OSError):  # stderr may be closed, too
                traceback.print_exc()
    signals.raises = False
    _leave(status if signals.status is None else signals.status)


class _Signals:
    """Handler of SIGTERM and Ctrl-C; status: the exit status after a signal, None before."""

    def __init__(self, serves: bool):
        self.status: int | None = None
        self.raises = True
        self._statuses = {
            signal.SIGTERM: ExitStatus.OK if serves else ExitStatus.TERMINATED,
            signal.SIGINT: ExitStatus.OK if serves else ExitStatus.INTERRUPTED,
        }
        for number in self._statuses:
            if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup or a shell's &
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self.status is not None:
            return
        self.status = self._statuses[signal.Signals(number)]
        # A destructor or callback would print the exception.
        sys.unraisablehook = lambda _: None
        # Not a threading.Thread: the main thread may hold that module's locks.
        _thread.start_new_thread(_end_late, (self.status,))
        if self.raises:
            raise KeyboardInterrupt


def _end_late(status: int) -> None:
    time.sleep(END_S)
    kill_children()
    os._exit(status)


def _leave(status: int) -> NoReturn:
    """End the process and its child processes at once.

    The interpreter's exit would wait for threads in endless calls, and abort if a daemon thread is
    in a library's code, such as torch's.
    """
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    kill_children()
    os._exit(status)


def _open_standard_files() -> None:
    """Open the null device for a closed stdin, stdout or stderr.

    Otherwise a socket or file could get its number, and receive printed text. Bytes that are not
    UTF-8, as in file names, pass through unchanged.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # gets the lowest free number: its own
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", closefd=False))
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, TextIOWrapper):
            file.reconfigure(errors="surrogateescape")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status. Raises SystemExit for wrong arguments, and help.

    Ends silently if the output's reader has gone, as with `| head -1`; other broken pipes and
    sockets raise. Reports a full disk in one line.
    """
    try:
        try:
            return _run_verb(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # closed, or only Python's
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if poll.poll(0):
                # Don't flush the rest of stdout's buffer at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return ExitStatus.UNREAD
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"{PROGRAM}: {error.strerror}. Free space, or write elsewhere.", file=sys.stderr)
        return ExitStatus.FAILED


def _run_verb(arguments: Sequence[str]) -> int:
    verb = next(iter(arguments), "")
    parser = make_parser(verb)
    if verb not in VERBS and not verb.startswith("-"):
        if not verb:
            parser.print_help()
            return ExitStatus.OK
        text = removed(verb, REMOVED_VERBS)
        parser.error(text or f"unknown command {verb!r}.{did_you_mean(verb, VERBS)}")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        refuse_unknown(getattr(parsed, "verb", parser), unknown)
    try:
        return parsed.run(parsed)
    except Qwen3OmniError as error:
        said = with_flags(str(error), parsed.verb, parsed.named_files)
        print(f"{PROGRAM}: {said}", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted.", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def make_parser(verb: str | None = None) -> ArgumentParser:
    """Create the parser. verb: the only verb whose arguments are added; None: all."""
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Qwen3-Omni listens, writes and speaks. VERB --help has flags and examples.",
    )
    version = f"{PROGRAM} {PACKAGE_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, (module, arguments, help_) in VERBS.items():
        usage = f"{PROGRAM} {name} [options] {arguments}".rstrip()
        made = verbs.add_parser(
            name, help=help_, usage=usage, formatter_class=RawDescriptionHelpFormatter
        )
        made.set_defaults(verb=made, named_files=())
        if verb in (None, name):
            getattr(import_module(f"{__name__}.{module}"), f"add_{name}")(made)
    return parser
