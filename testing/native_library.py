"""The compiled library in tests, and other libraries or none in its place."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.cpu.native import installed
from qwen3_omni_neuron.cpu.native.installed import find_library

# Where there is a compiler there is the library.
needs_c = pytest.mark.skipif(
    find_library() is None and not shutil.which("cc"), reason="no C compiler, so nothing in C"
)

KINDS = ("_vnni_avx512", "_avx512", "_avx2", "_plain")
"""Names of the kernels of each kind of processor."""


@pytest.fixture(scope="module")
def library() -> Any:
    """Return the compiled library, with a pool of 4 threads."""
    found = find_library()
    assert found is not None, "a compiler is there, and the library is not: pip install -e . -v"
    found.grow_pool(4)
    return found


@pytest.fixture(scope="module")
def exported(library: Any) -> CDLL:
    """The same library, with what it exports beside library.h."""
    return CDLL(str(installed.library_path()))


def kind_in_use(exported: CDLL) -> bytes:
    """The first field of the structure that `kernels` points to."""
    name = ctypes.POINTER(ctypes.c_char_p).in_dll(exported, "kernels").contents.value
    assert name is not None
    return name


@pytest.fixture
def use_kind(exported: CDLL) -> Iterator[Callable[[str], None]]:
    """Take the kernels of another kind; the test is skipped where the processor lacks them."""
    usual = kind_in_use(exported)

    def use(name: str) -> None:
        if not exported.use_kernels(name.encode()):
            pytest.skip(f"this processor has no kernels {name}")
        assert kind_in_use(exported) == name.encode()

    yield use
    assert exported.use_kernels(usual)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | None], None]]:
    """Let the package find another library than its own, or none."""

    def replace(library: Path | None) -> None:
        monkeypatch.setattr(installed, "library_path", lambda: library)
        find_library.cache_clear()

    yield replace
    find_library.cache_clear()
