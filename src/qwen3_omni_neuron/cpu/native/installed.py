"""The compiled library of this installation, checked against its sources and the Python beside it.

The ctypes structures mirror C structs by hand, so a library of other sources would corrupt memory.
"""

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from qwen3_omni_neuron.cpu.native import (
    audio_convolutions,
    binding,
    code2wav,
    draws,
    predictor,
    steps,
)
from qwen3_omni_neuron.cpu.native.binding import (
    CONSTANTS,
    MismatchError,
    declare_calls,
)
from qwen3_omni_neuron.cpu.native.sources import source_hash

logger = logging.getLogger(__name__)

REBUILD = (
    "rebuild it with `pip install -e .` in a checkout, or else with "
    "`pip install --force-reinstall --no-deps` and what you installed"
)
STRUCTS: dict[str, type[ctypes.Structure]] = {
    **binding.STRUCTS,
    **steps.STRUCTS,
    **predictor.STRUCTS,
    **draws.STRUCTS,
    **code2wav.STRUCTS,
    **audio_convolutions.STRUCTS,
}
"""The ctypes structures of all C structs that cross the boundary, by their names in C."""

TABLES = (
    "status_layout",
    "decoder_layout",
    "steps_layout",
    "predictor_layout",
    "draw_layout",
    "wave_layout",
    "code2wav_layout",
    "audio_convolutions_layout",
)
MOST_DIFFERENCES = 4  # named in one message


class _Entry(ctypes.Structure):
    """LayoutEntry of layout.h."""

    _fields_ = [("name", ctypes.c_char_p), ("number", ctypes.c_int64)]


def library_path() -> Path | None:
    """Return the library beside this file, or None where the installation compiled none."""
    paths = (Path(__file__).with_name(f"_library{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


@cache
def find_library() -> ctypes.CDLL | None:
    """Load the library once. Returns None, after a warning, where it must not be called."""
    path = library_path()
    if path is None:
        logger.warning("the C was not compiled and torch computes the same, slower: %s", REBUILD)
        return None
    try:
        return load_library(path)
    except MismatchError as error:
        logger.warning("%s is not used and torch computes the same, slower: %s", path, error)
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


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library and compare it with the C sources beside it and with the structures here.

    Raises MismatchError where they differ, or where it can't be loaded.
    """
    try:
        library = ctypes.CDLL(str(path))  # its calls let other threads of Python run
    except OSError as error:
        raise MismatchError(f"it can't be loaded ({error}); {REBUILD}") from None
    try:
        compiled = _text(library, "source_hash")
        beside = source_hash(path.parent)
        if beside is not None and compiled != beside:
            raise MismatchError(
                f"it was compiled from sources of hash {compiled}, and those beside it have "
                f"{beside}; {REBUILD}"
            )
        theirs = {name: number for table in TABLES for name, number in _table(library, table)}
        declare_calls(library)
    except (AttributeError, ValueError) as error:  # a symbol is missing
        raise MismatchError(f"it is of another version ({error}); {REBUILD}") from None
    differences = _differences(_layout(), theirs)
    if differences:
        shown = ", ".join(differences[:MOST_DIFFERENCES])
        more = len(differences) - MOST_DIFFERENCES
        raise MismatchError(
            f"its structs are not those of the Python beside it: {shown}"
            f"{f' and {more} more' if more > 0 else ''}; {REBUILD}"
        )
    return library


def _text(library: ctypes.CDLL, symbol: str) -> str:
    start = ctypes.c_char.in_dll(library, symbol)
    return ctypes.string_at(ctypes.addressof(start)).decode()


def _table(library: ctypes.CDLL, symbol: str) -> list[tuple[str, int]]:
    """Read a table of layout.h up to its end."""
    entry = ctypes.pointer(_Entry.in_dll(library, symbol))
    entries, i = [], 0
    while (name := entry[i].name) is not None:
        entries.append((name.decode(), entry[i].number))
        i += 1
    return entries


def _layout() -> dict[str, int]:
    """Return what C's tables must hold."""
    numbers = CONSTANTS | code2wav.CONSTANTS | draws.CONSTANTS
    for name, struct in STRUCTS.items():
        numbers[name] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            numbers[f"{name}.{field}"] = getattr(struct, field).offset
    return numbers


def _differences(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    """Describe each number that differs: its value in the library and its value here."""
    names = dict.fromkeys((*ours, *theirs))
    return [
        f"{name} is {theirs.get(name, 'missing')} in the library and {ours.get(name, 'missing')} "
        "here"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
