"""A target whose graphs are a few lines of text, compiled quickly and without torch."""

import errno
import os
import time
from pathlib import Path

from qwen3_omni_neuron.compilation.manifest import Call, GraphRecord, TensorSpec, record_files
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.target import Target

FILE_BYTES = 20_000
FILES = 3


def compile_slowly(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Write a few files, one of them in a folder, with a pause in the middle of each."""
    started = time.monotonic()
    (folder / "deep").mkdir()
    for number in range(FILES):
        name = f"deep/{number}.bin" if number else "0.bin"
        with (folder / name).open("wb") as file:
            for part in range(2):
                file.write(f"{graph} {number} {part} {plan.dtype}\n".encode() * (FILE_BYTES // 40))
                time.sleep(0.01)
    spec = {"x": TensorSpec(("rows", 3), plan.dtype)}
    calls = (Call("run", {}, spec, spec, {}), Call("run", {"rows": 8}, spec, spec, {}))
    return GraphRecord(calls, record_files(folder), time.monotonic() - started)


def compile_and_die(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Crash at the second graph as a compiler would."""
    if graph == "vision":
        os.write(1, b"internal compiler error: the wheels came off\n")
        os.abort()
    return compile_slowly(plan, graph, folder)


def compile_for_ever(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Compile for ten minutes, after a file that shows that it has begun."""
    (folder / "begun").touch()
    time.sleep(600)
    return compile_slowly(plan, graph, folder)


def compile_without_room(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Fail at the third graph because the disk is full."""
    record = compile_slowly(plan, graph, folder)
    if graph == "audio":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return record


def expected_bytes(plan: CompilePlan, graph: str) -> int:
    return FILES * FILE_BYTES


SLOW = Target(compile_slowly, expected_bytes)
LONG = Target(compile_for_ever, expected_bytes)
DYING = Target(compile_and_die, expected_bytes)
FULL = Target(compile_without_room, expected_bytes)
