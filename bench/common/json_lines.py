"""Manifests: files of one line an entry, and errors that name the line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class ManifestError(Exception):
    """There is nothing to measure, or it can't be told what."""


def read_entries(file: Path, parse: Callable[[Any], Entry], form: str) -> list[Entry]:
    """The entries of a file of JSON lines, in its order; blank lines are none.

    parse: the value of a line as an entry; raises ValueError, which says what is wrong. form: how a
    line looks, for errors. Raises ManifestError for a file that can't be read, a line that says
    something else, and where there is no line.
    """
    entries = []
    for number, line in numbered_lines(file):
        try:
            entries.append(parse(json.loads(line)))
        except ValueError as error:
            raise ManifestError(f"{file}:{number} is not {form}: {error}\n  {line[:80]}") from error
    if not entries:
        raise ManifestError(f"{file} is empty: it needs a line such as {form}.")
    return entries


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1. Raises ManifestError."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{file} can't be read: {error}") from error
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
