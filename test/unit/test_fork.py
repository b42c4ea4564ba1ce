"""Children that os.fork makes: they can't use their parent's model, and leave it as it is."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.session import Session
from testing.imports import PACKAGE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

AT_ONCE_S = 20.0
QUESTION = [{"role": "user", "content": "Hello"}]
SHORT: Any = {"seed": 0, "thinker_max_new_tokens": 3, "talker_max_new_tokens": 4}


def in_child(call: Callable[[], object]) -> str:
    """Return what a forked child raises in a call, "" for nothing. Fails after AT_ONCE_S."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode() + b".")
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], AT_ONCE_S)
        said = os.read(reading, 1 << 16).decode() if ready else ""
        assert said, "the child hangs" if not ready else "the child died"
        return said[:-1]
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Let another thread hold locks."""
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            holds.set()
            ends.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.fixture(scope="module")
def session(omni) -> Iterator[Session]:
    with omni.session(messages=QUESTION) as session:
        yield session


@pytest.fixture(scope="module")
def stream(omni) -> Iterator[SpeechStream]:
    """A stream of which no event was taken."""
    with omni.stream(QUESTION, seed=0) as stream:
        yield stream


async def next_event(stream: SpeechStream) -> object:
    return await anext(stream)


USES: dict[str, Callable[[Qwen3Omni, Session, SpeechStream, Path], object]] = {
    "load": lambda omni, *_: Qwen3Omni.load(omni.prompt_builder.folder),
    "generate_audio": lambda omni, *_: omni.generate_audio(QUESTION, **SHORT),
    "stream_text": lambda omni, *_: omni.stream_text(QUESTION, **SHORT),
    "say": lambda omni, *_: omni.say("Hello"),
    "session": lambda omni, *_: omni.session(),
    "restore_session": lambda omni, _, __, file: omni.restore_session(file),
    "status": lambda omni, *_: omni.status(),
    "close": lambda omni, *_: omni.close(),
    "compile_grammar": lambda omni, *_: omni.compile_grammar(grammar={"regex": "a"}),
    "stream next": lambda _, __, stream, ___: next(stream),
    "stream anext": lambda _, __, stream, ___: asyncio.run(next_event(stream)),
    "stream close": lambda _, __, stream, ___: stream.close(),
    "session respond": lambda _, session, *__: session.respond(),
    "session append": lambda _, session, *__: session.append("Hello"),
    "session messages": lambda _, session, *__: session.messages,
    "session save": lambda _, session, __, file: session.save(file),
    "session close": lambda _, session, *__: session.close(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_forked_child_is_told_at_once_to_spawn(use, omni, session, stream, tmp_path) -> None:
    """Also where its parent's other threads held the locks as it was forked."""
    locks = omni._pipeline._lock, omni._grammars._pool.lock, session._lock, session._saving
    with held(*locks):
        said = in_child(lambda: use(omni, session, stream, tmp_path / "session"))
    assert said.startswith("ForkError: process "), said
    assert f"was forked after process {os.getpid()} had loaded a model" in said
    assert 'multiprocessing.set_start_method("spawn")' in said


def test_a_model_that_was_closed_before_the_fork_is_not_loaded_anew(checkpoint) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=1):
        pass
    assert "ForkError" in in_child(lambda: Qwen3Omni.load(checkpoint))


def test_a_stream_goes_on_in_the_parent(omni) -> None:
    expected = omni.generate_audio(QUESTION, **SHORT)
    with omni.stream(QUESTION, **SHORT) as stream:
        first = next(stream)

        def leave() -> None:
            with omni, stream:  # each does nothing at the block's end
                stream.__del__()

        assert in_child(leave) == ""
        *_, last = (first, *stream)
    assert last.result.token_ids == expected.token_ids
    assert (last.result.codes == expected.codes).all()


def test_no_end_of_ours_does_anything_in_a_child(checkpoint) -> None:
    """At its exit or at a collection of garbage, a child runs what was to end in its parent."""
    with Qwen3Omni.load(checkpoint, placement="split", max_concurrency=1) as omni:
        ends = [
            end
            for end, info in weakref.finalize._registry.items()  # type: ignore[attr-defined]
            if info.func.__module__.startswith("qwen3_omni_neuron.")
        ]
        assert len(ends) >= 4  # the model and its three processes

        def end_all() -> None:
            for end in ends:
                end()

        assert in_child(end_all) == ""
        assert len(omni.generate_audio(QUESTION, **SHORT).codes)


def test_one_module_alone_names_what_ends_with_a_process() -> None:
    named = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for name in (
            "weakref.finalize(",
            "atexit.",
            "import atexit",
            " = tempfile.TemporaryDirectory(",
        )
        if name in file.read_text(encoding="utf-8")
    }
    assert named == {"engines/process/fork.py"}


LEAVES = f"""
import multiprocessing, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
from qwen3_omni_neuron import Qwen3Omni
with Qwen3Omni.load(sys.argv[1], max_concurrency=1, placement=sys.argv[2]) as omni:
    child = os.fork()
    if child == 0:
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
    process.start()
    process.join()
    print(process.exitcode)
    print(len(omni.generate_audio({QUESTION}, **{SHORT}).codes))
"""

# Torch's own threads work in the children, as by default on a machine of two cores.
PREFORK = f"""
import os, sys, torch
from qwen3_omni_neuron import Qwen3Omni
children = []
for _ in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        torch.set_num_threads(2)
        with Qwen3Omni.load(sys.argv[1], max_concurrency=1) as omni:
            frames = len(omni.generate_audio({QUESTION}, **{SHORT}).codes)
        sys.exit(10 + frames)
for child in children:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(script: str, *arguments: object) -> list[str]:
    """Run a script, in processes that end together, and return the words that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=3 * AT_ONCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, errors) == (0, "")
    return said.split()


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("placement", ["shared", pytest.param("split", marks=pytest.mark.repeats)])
def test_the_exit_of_a_child_ends_nothing_of_its_parent(placement, checkpoint) -> None:
    assert run(LEAVES, checkpoint, placement) == ["3", "4", "3"]


@pytest.mark.usefixtures("warm_commands")
def test_a_server_that_loads_in_its_children_alone_works(checkpoint) -> None:
    assert run(PREFORK, checkpoint) == ["13", "13"]
