"""The worker process that compiles one model.

It frees its memory at its end, may crash without ending the run, and may change its environment.
"""

import errno
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.compilation.manifest import ModelRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.target import ModelCompiler
from qwen3_omni_neuron.engines.process.child import (
    OutputTail,
    SentException,
    describe_exit,
    follow_parent,
    start_child,
)
from qwen3_omni_neuron.errors import CompileError

TICK_S = 0.2


def run_worker(
    compile_model: ModelCompiler,
    plan: CompilePlan,
    model: str,
    folder: Path,
    lock: int,
    tick: Callable[[], None],
) -> ModelRecord:
    """Compile one model into `folder` in a new process, and wait for it.

    lock: a descriptor that the process keeps open. tick: called while waiting. The process and its
    compilers are killed however this function ends. Raises the compile's exception (an OSError as a
    CompileError unless a disk is full), and CompileError if the process ended without one.
    """
    output = OutputTail()
    with tempfile.TemporaryFile() as answers:
        try:
            process = start_child(
                "qwen3_omni_neuron.compilation.worker",
                (answers.fileno(), lock),
                output,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            try:
                status = _wait(process, pickle.dumps((compile_model, plan, model, folder)), tick)
            finally:
                with suppress(ProcessLookupError, PermissionError):  # its session is empty
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            answers.seek(0)
            if not (answer := answers.read()):
                advice = plan.if_killed if status == -signal.SIGKILL else ""
                raise CompileError(
                    f"{model}: its compile {describe_exit(status)}.{advice} End of its "
                    f"output:\n{output.read() or '(none)'}"
                )
        finally:
            output.close()
    done, value = pickle.loads(answer)
    if done:
        return value
    error = value.exception()
    if isinstance(error, OSError) and not is_full(error):
        raise CompileError(f"{model}: its compile failed: {error}") from error
    raise error


def is_full(error: OSError) -> bool:
    """Return whether a disk or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def main(answers: int, lock: int, parent: int) -> None:
    """Run one compile in the worker. answers: descriptor of the outcome's file."""
    follow_parent(parent)
    for descriptor in (answers, lock):  # not for a compiler's child processes
        os.set_inheritable(descriptor, False)
    compile_model, plan, model, folder = pickle.load(sys.stdin.buffer)
    outcome: tuple[bool, Any]
    try:
        outcome = True, compile_model(plan, model, folder)
    except Exception as error:
        outcome = False, SentException(error)
    with os.fdopen(answers, "wb") as pipe:
        pickle.dump(outcome, pipe)


def _wait(process: "subprocess.Popen[bytes]", job: bytes, tick: Callable[[], None]) -> int:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(job)
    while True:
        try:
            return process.wait(TICK_S)
        except subprocess.TimeoutExpired:
            tick()
