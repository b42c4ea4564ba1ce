"""The command line that all benchmarks share: kinds of arguments, errors, the result's file."""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qwen3_omni_neuron import Qwen3OmniError
from testing.headlines import Headline
from testing.results import module_of, publish, results_of

Row = dict[str, Any]
# A benchmark's rows, its summary, and the figures that a reader wants first.
Figures = tuple[list[Row], dict[str, Any], list[Headline]]


class InputError(ValueError):
    """Input that a benchmark cannot measure."""


def parser_of(name: str, description: str) -> ArgumentParser:
    """Return the parser of a script, with its docstring as the help text. name: see module_of."""
    return ArgumentParser(
        prog=f"python -m {module_of(name)}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )


def add_endpoint_arguments(parser: ArgumentParser, text: str) -> None:
    """Add --url and --key: a server that is there already. text: what is done with it."""
    parser.add_argument("--url", help=f"{text}; --model is then the name of its model")
    default = os.environ.get("OPENAI_API_KEY")
    parser.add_argument("--key", default=default, help="with --url; default: OPENAI_API_KEY")


def run(
    name: str,
    parser: ArgumentParser,
    measure: Callable[[Namespace], Figures],
    arguments: Sequence[str] | None,
) -> int:
    """Parse the arguments, with --json added, measure, and publish the result.

    name: name of the benchmark. Returns the exit status: 0, or 1 after a message where nothing
    could be measured.
    """
    parser.add_argument("--json", type=Path, help="write the result with its rows to this file")
    options = parser.parse_args(arguments)
    try:
        rows, summary, headlines = measure(options)
    except (InputError, Qwen3OmniError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    publish(results_of(name, arguments, options, rows, summary, headlines), options.json)
    return 0


def positive(text: str) -> int:
    """Parse a number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def natural(text: str) -> int:
    """Parse a number of 0 or more."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def sizes(text: str) -> list[int]:
    """Parse numbers of 1 or more: "1,2,8" is [1, 2, 8]."""
    return [positive(size) for size in text.split(",")]
