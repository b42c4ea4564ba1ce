"""Examples in the help of the command line's verbs."""

import argparse
import re
import shlex

from qwen3_omni_neuron.cli import make_parser
from qwen3_omni_neuron.cli.parsing import PROGRAM


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb."""
    actions = make_parser()._actions
    [found] = [a.choices for a in actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found)


def examples(verb: str) -> list[list[str]]:
    """Return the commands of a verb's help, without the program and what is behind a pipe."""
    first, *lines = (verbs()[verb].epilog or "").splitlines()
    assert first == "examples:"
    found = [shlex.split(re.split(r" [|<>] ", line)[0]) for line in lines]
    assert all(words[0] == PROGRAM for words in found)
    return [words[1:] for words in found]
