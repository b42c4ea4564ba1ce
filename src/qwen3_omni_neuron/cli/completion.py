"""`qwen3-omni-neuron completion`: writes a shell's completion of this command line."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from qwen3_omni_neuron.cli.parsing import PROGRAM, CommandParser
from qwen3_omni_neuron.errors import NotInstalledError

SHELLS = {
    "bash": f"~/.local/share/bash-completion/completions/{PROGRAM}",
    "zsh": f"~/.zfunc/_{PROGRAM}",
    "fish": f"~/.config/fish/completions/{PROGRAM}.fish",
}
"""The shells, each with the file that it reads its user's completion from."""
_FILES, _FOLDERS = ("FILE", "CONFIG", "PEM"), ("DIR", "DIR|ID", "PATH")


def add_completion(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_complete)
    parser.add_argument("shell", choices=list(SHELLS), help="shell that completes the command")
    parser.add_examples(*(f"completion {shell} > {file}" for shell, file in SHELLS.items()))


def _complete(parsed: argparse.Namespace) -> int:
    """Print the completion. Returns the exit status."""
    from qwen3_omni_neuron.cli import make_parser

    try:
        import shtab
    except ImportError as error:
        raise NotInstalledError(
            f"completion needs shtab, which is not installed. Run: pip install '{PROGRAM}"
            "[completion]'."
        ) from error
    parser = make_parser()
    for action in _actions(parser):
        if action.type is Path or action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # which shtab looks for
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, parsed.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
