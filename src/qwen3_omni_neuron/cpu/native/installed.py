"""This installation's library, checked against sources and declarations."""

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.cpu.native.sources import source_digest

if TYPE_CHECKING:
    from qwen3_omni_neuron.engines.sampling import SampleIds

logger = logging.getLogger(__name__)

REBUILD = (
    "rebuild it with `pip install -e .` in a checkout, or else with "
    "`pip install --force-reinstall --no-deps` and what you installed"
)


class MismatchError(Exception):
    """Library of other sources."""


def library_path() -> Path | None:
    """Return the library beside this file, or None if none was compiled."""
    path = Path(__file__).with_name("_library.abi3.so")
    return path if path.exists() else None


@cache
def find_library() -> Any:
    """Load the library once. Returns None, after a warning, if it can't be used."""
    path = library_path()
    if path is None:
        logger.warning("the C library was not built; torch computes the same, slower: %s", REBUILD)
        return None
    try:
        return load_library(path)
    except MismatchError as error:
        logger.warning("%s is not used; torch computes the same, slower: %s", path, error)
        return None


def library_verdict() -> str:
    """Return a phrase about the library for `doctor`."""
    path = library_path()
    if path is None:
        return "not compiled"
    try:
        load_library(path)
    except MismatchError as error:
        return f"compiled, not used: {error}"
    return "compiled"


def load_library(path: Path) -> Any:
    """Load a library, whose calls release the interpreter lock; see cpu.native.binding.Library.

    Wrong declarations would corrupt memory: raises MismatchError if it was compiled from other
    sources than the declarations or the files beside it, or can't be loaded.
    """
    try:
        from qwen3_omni_neuron.cpu.native._declarations import ffi
    except ImportError as error:
        raise MismatchError(f"its declarations can't be imported ({error}); {REBUILD}") from None
    try:
        # It stays in memory when cffi closes it: its pool's threads run in it.
        library = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
        compiled: int = library.source_digest
    except (OSError, ffi.error) as error:
        raise MismatchError(f"it can't be loaded ({error}); {REBUILD}") from None
    for whose, digest in (
        ("the Python beside it is for", ffi.integer_const("SOURCE_DIGEST")),
        ("those beside it have", source_digest(path.parent)),
    ):
        if digest not in (compiled, None):
            raise MismatchError(
                f"it was compiled from sources of digest {compiled:015x}, and {whose} "
                f"{digest:015x}; {REBUILD}"
            )
    return library


def host_sampler() -> "SampleIds":
    """Return this host's sampler: compiled, or in numpy."""
    from qwen3_omni_neuron.engines.sampling import sample_ids

    library = find_library()
    if library is None:
        return sample_ids
    from qwen3_omni_neuron.cpu.native.sampler import NativeSampler

    return NativeSampler(library)
