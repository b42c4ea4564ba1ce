"""A pytest plugin: tests run only over a package that has the files of this tree."""

from pathlib import Path

import pytest

import qwen3_omni_neuron
from testing.imports import PACKAGE

# The build makes these; the first is checked against the sources when it is loaded.
BUILT = {"_library.abi3.so", "_declarations.py"}


def pytest_configure() -> None:
    """Compare the imported package with src, which it was installed from or is.

    Raises pytest.UsageError where they differ: tests would pass or fail by other sources.
    """
    imported = Path(qwen3_omni_neuron.__path__[0])
    if names := differing(PACKAGE, imported):
        raise pytest.UsageError(
            f"the package that tests import, {imported}, differs from src in {len(names)} files "
            f"({', '.join(names[:3])}). Install it again: make .venv/installed; or src itself, in "
            "which every change is there at once: make EDITABLE=1 .venv/installed."
        )


def differing(tree: Path, imported: Path) -> list[str]:
    """Return the names of files that differ, or that one of the two packages lacks, sorted."""
    if tree == imported or not tree.is_dir():
        return []
    ours, theirs = _contents(tree), _contents(imported)
    names = ours.keys() | theirs.keys()
    return sorted(name for name in names if ours.get(name) != theirs.get(name))


def _contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in BUILT)
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if file.parent.name != "__pycache__"
    }
