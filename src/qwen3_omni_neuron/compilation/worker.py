"""The worker process that compiles one model.

A separate process returns its memory when it ends, can crash without ending the run, and can change
its environment variables.
"""

import errno
import os
import pickle
import select
import signal
import subprocess
import sys
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
_PIPE_BYTES = 1 << 16


def run_worker(
    compile_model: ModelCompiler,
    plan: CompilePlan,
    model: str,
    folder: Path,
    lock: int,
    tick: Callable[[], None],
) -> ModelRecord:
    """Compile one model into `folder` in a new process, and wait for it.

    lock: a descriptor that the process keeps open until it ends. tick: called while waiting.
    The process, and the compilers that it has started, are killed when this function ends in any
    way.
    Raises the exception of the compile (an OSError as a CompileError unless a disk is full), and
    CompileError if the process ended without an exception.
    """
    results, answers = os.pipe()
    output = OutputTail()
    try:
        process = start_child(
            "qwen3_omni_neuron.compilation.worker",
            (answers, lock),
            output,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            os.close(answers)
            answers = -1
            job = pickle.dumps((compile_model, plan, model, folder))
            answer = _exchange(process, job, results, tick)
            status = process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):  # no process is left in its session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not answer:
            raise CompileError(
                f"{model}: its compile {describe_exit(status)}. The end of its output:\n"
                f"{output.read() or '(none)'}"
            )
        done, value = pickle.loads(answer)
        if not done:
            error = value.exception()
            if isinstance(error, OSError) and not is_full(error):
                raise CompileError(f"{model}: its compile failed: {error}") from error
            raise error
        return value
    finally:
        os.close(results)
        if answers != -1:
            os.close(answers)
        output.close()


def is_full(error: OSError) -> bool:
    """Return whether an error means that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def main(answers: int, lock: int, parent: int) -> None:
    """Run one compile in the worker process. answers: descriptor for the pickled outcome."""
    follow_parent(parent)
    for descriptor in (answers, lock):  # child processes of a compiler must not inherit them
        os.set_inheritable(descriptor, False)
    compile_model, plan, model, folder = pickle.load(sys.stdin.buffer)
    outcome: tuple[bool, Any]
    try:
        outcome = True, compile_model(plan, model, folder)
    except Exception as error:
        outcome = False, SentException.of(error)
    with os.fdopen(answers, "wb") as pipe:
        pickle.dump(outcome, pipe)


def _exchange(
    process: "subprocess.Popen[bytes]", job: bytes, results: int, tick: Callable[[], None]
) -> bytes:
    """Send the job, and read the answer until the process closes its end of the pipe or ends."""
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(job)
    except BrokenPipeError:
        return b""
    answer = b""
    poll = select.poll()
    poll.register(results, select.POLLIN)
    while True:
        ended = process.poll() is not None  # checked before the pipe: all that it wrote is there
        if poll.poll(0 if ended else 1000 * TICK_S):
            block = os.read(results, _PIPE_BYTES)
            if not block:
                return answer
            answer += block
        elif ended:
            # A child of the process still holds the pipe open.
            return answer
        tick()
