"""The compiled library in tests, and other libraries or none in its place."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.installed import find_library

# Where there is a compiler there is the library.
needs_c = pytest.mark.skipif(
    find_library() is None and not shutil.which("cc"), reason="no C compiler, so nothing in C"
)


@pytest.fixture(scope="module")
def library() -> Any:
    """Return the compiled library, with a pool of 4 threads."""
    found = find_library()
    assert found is not None, "a compiler is there, and the library is not: pip install -e . -v"
    found.grow_pool(4)
    return found


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | None], None]]:
    """Let the package find another library than its own, or none."""

    def replace(library: Path | None) -> None:
        monkeypatch.setattr(installed, "library_path", lambda: library)
        find_library.cache_clear()

    yield replace
    find_library.cache_clear()
