"""One graph's compile in a process of its own.

What the compile took of memory goes back with it, whatever a compiler does to its process ends
there, and it has an environment of its own to give.
"""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.target import GraphCompiler
from qwen3_omni_neuron.errors import CompileError
from qwen3_omni_neuron.process.child import (
    OutputTail,
    describe_exit,
    follow_parent,
    start_child,
)
from qwen3_omni_neuron.process.failure import Failure

TICK_S = 0.2
_PIPE_BYTES = 1 << 16


def run_worker(
    compile_graph: GraphCompiler,
    plan: CompilePlan,
    graph: str,
    folder: Path,
    lock: int,
    tick: Callable[[], None],
) -> GraphRecord:
    """Compile one graph into `folder` in a new process, and wait for it.

    lock: a descriptor that the process keeps as long as it lives. tick: called while waiting.
    Whatever ends the wait ends the process.
    Raises what compiling raised, and CompileError where the process ended by itself.
    """
    results, answers = os.pipe()
    output = OutputTail()
    try:
        process = start_child(
            "qwen3_omni_neuron.compilation.worker",
            (answers, lock),
            output,
            stdin=subprocess.PIPE,
        )
        try:
            os.close(answers)
            answers = -1
            job = pickle.dumps((compile_graph, plan, graph, folder))
            answer = _exchange(process, job, results, tick)
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if not answer:
            raise CompileError(
                f"{graph}: its compile {describe_exit(status)}. The end of its output:\n"
                f"{output.read() or '(none)'}"
            )
        done, value = pickle.loads(answer)
        if not done:
            raise value.exception()
        return value
    finally:
        os.close(results)
        if answers != -1:
            os.close(answers)
        output.close()


def main(answers: int, lock: int, parent: int) -> None:
    """What the process runs. answers: a descriptor that takes the pickled outcome."""
    follow_parent(parent)
    for descriptor in (answers, lock):  # not for what a compiler starts
        os.set_inheritable(descriptor, False)
    compile_graph, plan, graph, folder = pickle.load(sys.stdin.buffer)
    outcome: tuple[bool, Any]
    try:
        outcome = True, compile_graph(plan, graph, folder)
    except Exception as error:
        outcome = False, Failure.of(error)
    with os.fdopen(answers, "wb") as pipe:
        pickle.dump(outcome, pipe)


def _exchange(
    process: "subprocess.Popen[bytes]", job: bytes, results: int, tick: Callable[[], None]
) -> bytes:
    """Send the job, and collect what comes back until the process has closed its end or ended."""
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
        if poll.poll(1000 * TICK_S):
            block = os.read(results, _PIPE_BYTES)
            if not block:
                return answer
            answer += block
        elif process.poll() is not None:
            # Something that it has forked holds the pipe open after it.
            return answer
        tick()
