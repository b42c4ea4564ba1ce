"""Additions to argparse: examples, suggestions for unknown names, messages that name flags."""

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from qwen3_omni_neuron.errors import REMOVED_FLAGS, REMOVED_OPTIONS, did_you_mean, removed

PROGRAM = "qwen3-omni-neuron"
STDIN = "-"
# Advice for a file of another kind; see prompt.media.fields.
_ITEM = re.compile(r'Send it as an item of type "(\w+)" \([^)]*\)')


def add_examples(parser: ArgumentParser, *commands: str) -> None:
    """Show commands, without the program's name, at the end of the help."""
    shown = "\n".join(f"  {PROGRAM} {command}" for command in commands)
    parser.epilog = f"examples:\n{shown}"


def refuse_unknown(verb: ArgumentParser, arguments: Sequence[str]) -> NoReturn:
    """End the process with an error that names the unknown arguments and the nearest known one."""
    flag = arguments[0].partition("=")[0]
    option = flag.removeprefix("--").replace("-", "_")
    for name, table in ((flag, REMOVED_FLAGS), (option, REMOVED_OPTIONS)):
        if text := removed(name, table):
            verb.error(with_flags(f"{flag}{text.removeprefix(name)}", verb))
    known = [name for name in verb._option_string_actions if name.startswith("--")]
    several = "s" * (len(arguments) > 1)
    verb.error(f"unknown argument{several}: {' '.join(arguments)}.{did_you_mean(flag, known)}")


class NamedFile(NamedTuple):
    """File of a command line: its place in messages, its path, and its text with the flag.

    place: such as "messages[0].content[1]", where a message about the file begins.
    """

    place: str
    path: str
    shown: str


def with_flags(message: str, verb: ArgumentParser, files: Iterable[NamedFile] = ()) -> str:
    """Return a message with options and files named by a verb's flags."""
    for file in files:
        if re.match(re.escape(file.place) + r"(?!\w)", message):
            about = message.removeprefix(file.place)
            found = f": {file.path} "
            if about.startswith(found):
                about = ": the file " + about.removeprefix(found)
            message = file.shown + _ITEM.sub(r"Give it with --\1", about)
    flags = {
        action.dest: action.option_strings[0]
        for action in verb._actions
        if action.option_strings and "_" in action.dest
    }
    flags["model_path"] = "--model"
    pattern = rf"(?<![\w.\"'`/-])({'|'.join(flags)})(?![\w=\"'`/-]|\.\w)"
    return re.sub(pattern, lambda found: flags[found[1]], message)
