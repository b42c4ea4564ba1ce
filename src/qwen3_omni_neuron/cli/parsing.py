"""Parser of the command line: short errors, usage and help with examples.

It is built by every call of the command, so that neither this nor a verb's module imports a large
package before the verb runs.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from qwen3_omni_neuron.errors import (
    REMOVED_FLAGS,
    REMOVED_OPTIONS,
    REMOVED_VERBS,
    ExitStatus,
    did_you_mean,
    removed,
)

PROGRAM = "qwen3-omni-neuron"
# Advice about a medium of another kind.
_ITEM = re.compile(r'Send it as an item of type "(\w+)" \([^)]*\)')


class CommandParser(argparse.ArgumentParser):
    """Parser of the command or of a verb.

    A wrong argument ends the process with one line that says what is wrong, and one that names the
    help; argparse would print all flags before them.
    """

    def __init__(self, **given: Any):
        super().__init__(**given, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_examples(self, *commands: str) -> None:
        """Show commands at the end of the help, each without the program's name."""
        shown = "\n".join(f"  {PROGRAM} {command}" for command in commands)
        self.epilog = f"examples:\n{shown}"

    def format_help(self) -> str:
        """Return the help, whose usage has no flags: they are listed below it."""
        positional = "".join(
            f" [{a.metavar or a.dest}]" if a.nargs in ("?", "*") else f" {a.metavar or a.dest}"
            for a in self._get_positional_actions()
        )
        self.usage = f"%(prog)s [options]{positional}"
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line. An unknown flag is refused by the verb that lacks it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb: CommandParser = getattr(parsed, "verb", self)
            verb.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """End the process with the arguments that this parser does not know."""
        flag = arguments[0].partition("=")[0]
        option = flag.removeprefix("--").replace("-", "_")
        for name, table in ((flag, REMOVED_FLAGS), (option, REMOVED_OPTIONS)):
            if text := removed(name, table):
                self.error(with_flags(f"{flag}{text.removeprefix(name)}", self))
        known = [name for name in self._option_string_actions if name.startswith("--")]
        hint = did_you_mean(flag, known)
        self.error(f"unknown argument{'s' * (len(arguments) > 1)}: {' '.join(arguments)}.{hint}")

    def error(self, message: str) -> NoReturn:
        """End the process with what is wrong with the command line."""
        found = re.match(r"argument VERB: invalid choice: '(\S+)' \(choose from (.*)\)", message)
        if found:
            known = re.findall(r"[\w-]+", found[2])
            message = removed(found[1], REMOVED_VERBS)
            if not message:
                message = f"unknown command {found[1]!r}.{did_you_mean(found[1], known)}"
        text = f"{self.prog}: {message}\nSee: {self.prog} --help\n"
        self.exit(ExitStatus.WRONG_COMMAND_LINE, text)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message. argparse would hide that nobody reads it."""
        (file or sys.stderr).write(message)


def _flags_of(verb: CommandParser) -> dict[str, str]:
    """Return the flags of a verb by the names that they have in errors of the package."""
    flags = {
        action.dest: action.option_strings[0] for action in verb._actions if action.option_strings
    }
    return {"model_path": "--model", **{name: flag for name, flag in flags.items() if "_" in name}}


class GivenFile(NamedTuple):
    """File of a command line: how messages of the package name it, its path, and its flag with it.

    place: such as "messages[0].content[1]", with which a message about the file begins.
    """

    place: str
    path: str
    shown: str


def with_flags(message: str, verb: CommandParser, files: Iterable[GivenFile] = ()) -> str:
    """Return a message of the package with the options and files of a verb named by its flags."""
    for file in files:
        if re.match(re.escape(file.place) + r"(?!\w)", message):
            about = message.removeprefix(file.place)
            found = f": {file.path} "
            if about.startswith(found):
                about = ": the file " + about.removeprefix(found)
            message = file.shown + _ITEM.sub(r"Give it with --\1", about)
    flags_of = _flags_of(verb)
    pattern = rf"(?<![\w.\"'`/-])({'|'.join(flags_of)})(?![\w=\"'`/-]|\.\w)"
    return re.sub(pattern, lambda found: flags_of[found[1]], message)


def add_quiet(parser: CommandParser) -> None:
    """Add --quiet to a verb that shows its progress."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")
