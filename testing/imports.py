"""The package's layers and the imports between its rooms, read from the source by AST."""

import ast
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "qwen3_omni_neuron"
PACKAGE = ROOT / "src" / NAME
# Lowest first. A module imports from its own room or from a lower layer, never beside or up.
LAYERS = [
    {"errors", "model"},
    {"checkpoint", "events"},
    {"prompt"},
    {"engines"},
    {"options", "helpers"},
    {"compilation"},
    {"runtime"},
    {"cpu", "neuron"},
    {"session", "transcription"},
    {"api"},
    {"__init__"},
    {"serving"},
    {"verification"},
    {"cli"},
    {"__main__"},
]


def package_files() -> list[Path]:
    """Return every Python file of the package, sorted, without the one that the build writes."""
    return sorted(file for file in PACKAGE.rglob("*.py") if file.name != "_declarations.py")


def module_parts(file: Path) -> tuple[str, ...]:
    """Return a module's dotted name below the package, in parts."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def room(parts: tuple[str, ...]) -> str:
    """Return the file or folder directly under the package that a module lives in."""
    return parts[0] if parts else "__init__"


def layer(name: str) -> int:
    """Return the index in LAYERS of a room."""
    return next(i for i, rooms in enumerate(LAYERS) if name in rooms)


@cache
def imports(file: Path) -> Set[str]:
    """Return every dotted name that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def room_imports() -> dict[str, set[str]]:
    """Return for each room the other rooms of the package that its files import."""
    found: dict[str, set[str]] = {name: set() for rooms in LAYERS for name in rooms}
    for file, name in _package_imports():
        own, other = room(module_parts(file)), room(tuple(name.split(".")[1:]))
        if own != other:
            found[own].add(other)
    return found


def _package_imports() -> Iterator[tuple[Path, str]]:
    for file in package_files():
        for name in imports(file):
            if name.split(".")[0] == NAME:
                yield file, name
