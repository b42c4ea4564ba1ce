"""The command line, `qwen3-omni-neuron VERB`: a file for each verb, or for two alike."""

import os
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TextIO

from qwen3_omni_neuron.cli.ending import EndBySignal, leave, open_standard_files
from qwen3_omni_neuron.cli.parsing import PROGRAM, CommandParser, with_flags
from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.errors import ExitStatus, Qwen3OmniError


def run() -> NoReturn:
    """Run the verb of this process's command line, and end the process with its exit status."""
    ends = EndBySignal(serves=sys.argv[1:2] == ["serve"])
    status: int = ExitStatus.FAILED
    try:
        with ends:
            open_standard_files()
            status = main()
    except SystemExit as end:  # from argparse, which has printed what is wrong
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a library may have made another exception of KeyboardInterrupt
        if ends.status is None:
            with suppress(OSError):  # nobody may read stderr either
                traceback.print_exc()
    leave(status if ends.status is None else ends.status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status. Raises SystemExit for a wrong command line, and help.

    Where the reader of the output is gone, as `| head -1` is, it ends without a word. A pipe or a
    socket of the verb's own that breaks is an error like others, which is raised.
    """
    try:
        try:
            return _run_verb(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        # The rest of stdout's buffer must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.UNREAD


def _is_unread(file: TextIO) -> bool:
    """Return whether a file is a pipe or a socket whose reader is gone."""
    try:
        poll = select.poll()
        poll.register(file.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed, or of Python alone
        return False


def _run_verb(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.run is None:
        parser.print_help()
        return ExitStatus.OK
    try:
        return parsed.run(parsed)
    except Qwen3OmniError as error:
        said = with_flags(str(error), parsed.verb, parsed.given_files)
        print(f"{PROGRAM}: {said}", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted.", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def make_parser() -> CommandParser:
    """Make the parser of the whole command line."""
    # A signal is taken before these imports, which take a tenth of a second: see `run`.
    from qwen3_omni_neuron.cli.compile import add_compile
    from qwen3_omni_neuron.cli.completion import add_completion
    from qwen3_omni_neuron.cli.doctor import add_doctor
    from qwen3_omni_neuron.cli.inspect import add_inspect
    from qwen3_omni_neuron.cli.serve import add_serve
    from qwen3_omni_neuron.cli.speak import add_say, add_speak
    from qwen3_omni_neuron.cli.transcribe import add_transcribe
    from qwen3_omni_neuron.cli.verify import add_verify

    parser = CommandParser(
        prog=PROGRAM,
        description="Qwen3-Omni listens, writes and speaks. VERB --help has flags and examples.",
    )
    version = f"{PROGRAM} {PACKAGE_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(run=None)
    verbs = parser.add_subparsers(metavar="VERB")

    add_speak(verbs.add_parser("speak", help="answer a question in text and speech"))
    add_say(verbs.add_parser("say", help="speak a text itself"))
    add_serve(verbs.add_parser("serve", help="answer over HTTP, as OpenAI's API does"))
    add_transcribe(verbs.add_parser("transcribe", help="write down the words of sound files"))
    add_compile(verbs.add_parser("compile", help="convert a checkpoint once, for one target"))
    add_inspect(
        verbs.add_parser("inspect", help="show what compile wrote, and verify it; or a checkpoint")
    )
    add_doctor(verbs.add_parser("doctor", help="report on this machine, to paste into an issue"))
    add_verify(verbs.add_parser("verify", help="compare a model with transformers, by stages"))
    add_completion(
        verbs.add_parser("completion", help="write a shell's completion of this command"),
        make_parser,
    )
    for made in verbs.choices.values():
        made.set_defaults(verb=made, given_files=())
    return parser
