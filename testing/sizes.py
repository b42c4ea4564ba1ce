"""Sizes of the project's rooms and documents, and the ceilings that they stay below.

    python -m testing.sizes

Whoever needs a line takes another out. The figures of CEILING and DOCUMENT_WORDS fall when a change
ends below them, and never rise.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from testing.imports import ROOT, module_parts, package_files, room


@dataclass(frozen=True)
class Size:
    """Python files, their lines, and the words of their docstrings and comments."""

    files: int = 0
    lines: int = 0
    words: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.files + other.files, self.lines + other.lines, self.words + other.words)


UNITS = ("files", "lines", "words")
CEILING = {
    "src": Size(files=250, lines=44_400, words=54_900),
    "test and testing": Size(files=10_000, lines=58_950, words=1_000_000),
}
DOCUMENT_WORDS = 44_990
"""Words of all documents but CHANGELOG, without the parts that testing.generated writes."""


def document_words() -> int:
    """Return the words that DOCUMENT_WORDS limits."""
    files = [*ROOT.glob("*.md")]
    for folder in ("docs", "examples", "src/qwen3_omni_neuron/speaking_checkpoint"):
        files += (ROOT / folder).rglob("*.md")
    texts = [file.read_text(encoding="utf-8") for file in files if file.name != "CHANGELOG.md"]
    generated = re.compile(r"<!-- generated.*?<!-- end of.*?-->", re.DOTALL)
    return sum(len(generated.sub("", text).split()) for text in texts)


def size_of(file: Path) -> Size:
    """Return the size of a Python file."""
    text = file.read_text(encoding="utf-8")
    return Size(1, text.count("\n"), sum(len(words.split()) for words in _prose(text)))


def _prose(text: str) -> Iterator[str]:
    """Yield a file's docstrings, those of variables included, and its comments."""
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")


def sizes() -> dict[str, dict[str, Size]]:
    """Return sizes by room, for each name of CEILING."""
    found: dict[str, dict[str, Size]] = {name: defaultdict(Size) for name in CEILING}
    for file in package_files():
        name = room(module_parts(file))
        found["src"][name] += size_of(file)
    for folder in ("test", "testing"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = "/".join(file.relative_to(ROOT).parent.parts[:2])
            found["test and testing"][name] += size_of(file)
    return {name: dict(rooms) for name, rooms in found.items()}


def excess() -> list[str]:
    """Return a line for each figure that is above its ceiling."""
    lines = []
    for name, rooms in sizes().items():
        total = sum(rooms.values(), Size())
        figures = zip(UNITS, astuple(total), astuple(CEILING[name]), strict=True)
        lines += [
            f"{name} has {have:,} {unit}, {have - most:,} above the ceiling of {most:,}."
            for unit, have, most in figures
            if have > most
        ]
    if (words := document_words()) > DOCUMENT_WORDS:
        lines.append(f"documents have {words:,} words, more than {DOCUMENT_WORDS:,}.")
    return lines


def main() -> None:
    """Print the sizes of every room. Exits with 1 where a total is above its ceiling."""
    for name, rooms in sizes().items():
        print(f"{name:24}{'files':>8}{'lines':>10}{'words':>10}")
        for key in sorted(rooms):
            print(f"  {key:22}{rooms[key].files:8,}{rooms[key].lines:10,}{rooms[key].words:10,}")
        total = sum(rooms.values(), Size())
        print(f"  {'total':22}{total.files:8,}{total.lines:10,}{total.words:10,}\n")
    print(f"documents{document_words():40,}")
    if above := excess():
        sys.exit("\n".join(above))


if __name__ == "__main__":
    main()
