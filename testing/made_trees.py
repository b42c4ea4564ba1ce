"""A target whose models are a few lines of text, compiled quickly and without torch."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from qwen3_omni_neuron.compilation.manifest import (
    GraphRecord,
    ModelRecord,
    TensorRecord,
    record_files,
)
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.cpu.target import CPU

FILE_BYTES = 20_000
FILES = 3


def compile_slowly(plan: CompilePlan, model: str, folder: Path) -> ModelRecord:
    """Write a few files, one of them in a folder, with a pause in the middle of each."""
    started = time.monotonic()
    (folder / "deep").mkdir()
    for number in range(FILES):
        name = f"deep/{number}.bin" if number else "0.bin"
        with (folder / name).open("wb") as file:
            for part in range(2):
                file.write(f"{model} {number} {part} {plan.dtype}\n".encode() * (FILE_BYTES // 40))
                time.sleep(0.01)
    spec = {"x": TensorRecord(("rows", 3), plan.dtype)}
    graphs = (
        GraphRecord("run", {}, spec, spec, {}),
        GraphRecord("run", {"rows": 8}, spec, spec, {}),
    )
    return ModelRecord(graphs, record_files(folder), time.monotonic() - started)


def compile_and_die(plan: CompilePlan, model: str, folder: Path) -> ModelRecord:
    """Crash at the second model as a compiler would."""
    if model == "vision":
        os.write(1, b"internal compiler error: the wheels came off\n")
        os.abort()
    return compile_slowly(plan, model, folder)


def compile_and_be_killed(plan: CompilePlan, model: str, folder: Path) -> ModelRecord:
    """Be killed at the second model, as for its memory."""
    if model == "vision":
        os.kill(os.getpid(), signal.SIGKILL)
    return compile_slowly(plan, model, folder)


def compile_for_ten_minutes(plan: CompilePlan, model: str, folder: Path) -> ModelRecord:
    """Compile for ten minutes in a program of its own, whose process id is in a file."""
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "begun").write_text(str(compiler.pid))
    compiler.wait()
    return compile_slowly(plan, model, folder)


def expected_bytes(plan: CompilePlan, model: str) -> int:
    return FILES * FILE_BYTES


SLOW = replace(CPU, expected_bytes=expected_bytes, compile_model=compile_slowly)
LONG = replace(CPU, expected_bytes=expected_bytes, compile_model=compile_for_ten_minutes)
DYING = replace(CPU, expected_bytes=expected_bytes, compile_model=compile_and_die)
KILLED = replace(CPU, expected_bytes=expected_bytes, compile_model=compile_and_be_killed)
