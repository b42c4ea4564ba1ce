"""Engines in processes of their own: what is said arrives, and every way to end ends."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.engines import remote
from qwen3_omni_neuron.engines.process.child import MOST_OUTPUT_BYTES, TAIL_BYTES
from qwen3_omni_neuron.engines.process.engine_process import EngineGroup
from qwen3_omni_neuron.engines.process.mailbox import FIRST_BYTES
from qwen3_omni_neuron.engines.remote import RemoteEngine, remote_engines
from qwen3_omni_neuron.errors import CheckpointError, ClosedError, EngineDiedError, OptionError
from testing.fake_engines_for_processes import (
    FakeParent,
    FakeThinker,
    broken_engine,
    engine_that_dies,
    slow_engine,
)
from testing.subprocesses import lives, wait_until

AT_ONCE_S = 20.0  # on a busy machine; a stalled call would take 600 s
START_S = 60.0  # a first import of torch, of a machine that does other things
Process = Callable[..., EngineGroup]


@pytest.fixture
def start() -> Iterator[Process]:
    """Starts processes, which the test's end closes."""
    started = []

    def start_one(factory=FakeThinker, env=None, **options: Any) -> EngineGroup:
        started.append(EngineGroup(["thinker"], [factory], [env or {}], **options))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineGroup]:
    """A thinker's process that the tests leave as it was."""
    process = EngineGroup(["thinker"], [FakeThinker], [{}])
    process.wait_ready(START_S)
    yield process
    process.close()


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


def test_a_tensor_comes_back_as_it_was_sent(shared) -> None:
    for dtype in DTYPES:
        for shape in [(), (0,), (3, 0, 2), (1,), (5, 7), (150, 150)]:
            sent = (torch.randn(shape) * 50).to(dtype)
            back = shared.call("echo", sent)
            assert back.dtype == dtype and back.shape == sent.shape
            assert bits(back) == bits(sent)
            assert not len(bits(back)) or back.data_ptr() % 16 == 0, "as torch aligns its memory"
            back.zero_()  # its own memory, and writable
    for rows in (9, 400):
        table = torch.randn(rows, 60)
        views = (
            *(table.mT, table[::2, 1::3], table[:1].expand(4, -1), table.flip(0)),
            *(table.clone().requires_grad_(), table.bfloat16().mT),
        )
        for sent in views:
            back = shared.call("echo", sent)
            assert torch.equal(back, sent) and back.is_contiguous() and not back.requires_grad


def test_an_array_comes_back_as_it_was_sent(shared) -> None:
    for sent in (
        np.arange(90_000, dtype=np.float32).reshape(300, 300).T,
        np.arange(90_000, dtype=np.int16)[::3],
        np.zeros((0, 3)),
        np.array(2.5),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["text", None], dtype=object),
    ):
        back = shared.call("echo", sent)
        assert back.dtype == sent.dtype
        np.testing.assert_array_equal(back, sent)


def test_values_outlive_the_messages_that_follow(shared) -> None:
    first = [shared.call("echo", torch.full((n,), 1.0)) for n in (10, 50_000)]
    shared.call("echo", torch.full((50_000,), 2.0))
    assert all(bool((kept == 1).all()) for kept in first)


def test_a_message_larger_than_the_block_makes_it_grow(shared) -> None:
    for factor in (1, 3, 2, 7):
        sent = torch.randint(0, 255, (factor * FIRST_BYTES + 5,), dtype=torch.uint8)
        assert torch.equal(shared.call("echo", sent), sent)
    assert torch.equal(shared.call("echo", torch.ones(9)), torch.ones(9))


def test_an_exception_keeps_its_type_and_brings_its_traceback(shared) -> None:
    with pytest.raises(OptionError, match="speaker is 'Nobody'") as caught:
        shared.call("refuse", "option")
    assert "fake_engines_for_processes.py" in str(caught.value.__cause__)
    with pytest.raises(ConnectionResetError, match="a file server"):
        shared.call("refuse", "connection")
    with pytest.raises(RuntimeError, match=r"UnpicklableError: code 7 at here") as caught_other:
        shared.call("refuse", "other")
    assert "in refuse" in str(caught_other.value.__cause__)
    assert shared.call("echo", 1) == 1


def test_what_cannot_be_pickled_is_refused_and_harms_nothing(shared) -> None:
    with pytest.raises(Exception, match="lambda"):
        shared.call("echo", lambda: None)
    with pytest.raises(Exception, match="lambda"):
        shared.call("unpicklable")
    with pytest.raises(AttributeError, match="no_such_method"):
        shared.call("no_such_method")
    assert shared.call("echo", 1) == 1


def test_calls_from_several_threads_take_turns(shared) -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(50):
            back = shared.call("echo", torch.full((9000,), number))
            if not bool((back == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_environment_threads_and_path_of_the_process(start) -> None:
    process = start(env={"NEURON_RT_VISIBLE_CORES": "4-7"}, threads=1)
    process.wait_ready(START_S)
    assert process.call("environment") == ("4-7", 1, sys.path)
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ


DEATHS = {
    "exit": "ended with exit status 3",
    "kill": "was ended by SIGKILL",
    "segfault": "was ended by SIGSEGV",
}


def test_a_death_in_a_call_is_told_at_once_with_the_end_of_its_output(start) -> None:
    processes = {how: start() for how in DEATHS}
    for how, process in processes.items():
        process.wait_ready(START_S)
        begin = time.monotonic()
        with pytest.raises(EngineDiedError) as caught:
            process.call("die", how)
        with pytest.raises(EngineDiedError) as again:
            process.call("echo", 1)
        assert time.monotonic() - begin < AT_ONCE_S
        words = str(caught.value)
        assert f"The thinker engine (process {process.pids[0]}) {DEATHS[how]}" in words
        assert "Load the model again" in words and "about to leave" in words
        assert ("Segmentation fault" in words) == (how == "segfault")
        assert str(again.value) == words


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a call"])
def test_a_process_that_ends_is_found_by_a_look(start, busy) -> None:
    """Between two calls, and by another thread than the one whose call ends with it."""
    process = start()
    process.wait_ready(START_S)
    ended: list[str] = []

    def call() -> None:
        try:
            process.call("stall", 600)
        except EngineDiedError as error:
            ended.append(str(error))

    caller = threading.Thread(target=call)
    if busy:
        caller.start()
    assert process.fault() is None
    os.kill(process.pids[0], signal.SIGKILL)
    fault = str(wait_until(process.fault))
    assert f"The thinker engine (process {process.pids[0]}) was ended by SIGKILL" in fault
    with pytest.raises(EngineDiedError, match="was ended by SIGKILL"):
        process.call("echo", 1)
    if busy:
        caller.join(START_S)
        assert ended == [fault]
    process.close()
    assert str(process.fault()) == fault


def test_an_engine_whose_own_process_has_ended_ends_its_process(start) -> None:
    process = start(FakeParent)
    process.wait_ready(START_S)
    os.kill(process.call("child_pid"), signal.SIGKILL)
    fault = str(wait_until(process.fault))
    assert "ended with exit status 1" in fault
    assert "EngineDiedError: The child of the thinker was ended" in fault


def test_memory_that_malloc_keeps_goes_back_while_nothing_calls(start) -> None:
    process = start()
    process.wait_ready(START_S)
    before_mb = resident_mb_of(process.pids[0])
    process.call("use_memory", 200)
    wait_until(lambda: resident_mb_of(process.pids[0]) < before_mb + 50)
    assert process.call("echo", 1) == 1


def test_what_an_engine_is_made_of_is_not_looked_through_for_garbage(shared) -> None:
    kept, looked_through = shared.call("collected")
    assert kept > 50_000
    assert looked_through < kept / 20


def test_close_ends_a_call_that_stalls(start) -> None:
    process = start()
    process.wait_ready(START_S)
    ended: list[tuple[float, BaseException]] = []

    def stalled_call() -> None:
        try:
            process.call("stall", 600)
        except ClosedError as error:
            ended.append((time.monotonic(), error))

    thread = threading.Thread(target=stalled_call)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    closers = [threading.Thread(target=process.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for waiting in (thread, *closers):
        waiting.join(AT_ONCE_S)
        assert not waiting.is_alive()
    assert ended and ended[0][0] - begin < AT_ONCE_S
    assert not lives(process.pids[0])
    process.close()
    assert process.fault() is None
    with pytest.raises(ClosedError, match="Load the model again"):
        process.call("echo", 1)


def test_close_lets_the_engine_close(start, tmp_path) -> None:
    note = tmp_path / "note"
    process = start(functools.partial(FakeThinker, note=str(note)))
    RemoteEngine("thinker", process, START_S).close()
    assert note.read_text() == "closed"


def test_what_fails_while_building_is_raised_here(start, monkeypatch) -> None:
    process, pids = start(broken_engine), list[int]()
    with pytest.raises(CheckpointError, match=r"config\.json is missing") as caught:
        process.wait_ready(START_S)
    assert "in broken_engine" in str(caught.value.__cause__)
    assert not lives(process.pids[0])

    def noted(_: Any, factories: Sequence[Callable[[], Any]], *__: Any) -> EngineGroup:
        process = start(*factories)
        pids.extend(process.pids)
        return process

    monkeypatch.setattr(remote, "EngineGroup", noted)
    factories = {"thinker": FakeThinker, "talker": engine_that_dies}
    with pytest.raises(EngineDiedError, match=r"exit status 4(.|\n)*no cores left"):
        remote_engines(factories, {stage: {} for stage in factories}, 1, START_S)
    assert len(pids) == 2 and not any(map(lives, pids))
    with pytest.raises(Exception, match="lambda"):
        start(lambda: None)


def test_an_engine_that_is_not_ready_in_time_is_ended(start) -> None:
    process = start(functools.partial(slow_engine, 600.0))
    with pytest.raises(EngineDiedError, match=r"did not finish 'starting' within 0\.5 s"):
        process.wait_ready(0.5)
    assert not lives(process.pids[0])


def test_an_interrupt_of_the_terminal_is_left_to_the_parent(start) -> None:
    process = start()
    os.kill(process.pids[0], signal.SIGINT)  # while it is importing
    process.wait_ready(START_S)
    os.kill(process.pids[0], signal.SIGINT)
    assert process.call("echo", 1) == 1
    # Here it interrupts the call, whose answer the next one must not take for its own. Tests that
    # were started in the background inherit that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            process.call("stall", 600)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ClosedError, match="interrupted"):
        process.call("echo", 1)


def test_output_of_calls_does_not_fill_the_disk(start) -> None:
    process = start()
    process.wait_ready(START_S)
    for _ in range(3):
        process.call("say", "a warning " * (MOST_OUTPUT_BYTES // 10))
    process.call("say", "the last words")
    process.call("echo", 1)
    assert os.fstat(process._processes[0].output.file.fileno()).st_size < 2 * TAIL_BYTES
    assert process._processes[0].output.read().endswith("a warning \nthe last words")


def test_calls_hold_no_descriptors(shared) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    shared.call("echo", torch.zeros(100))
    before = descriptors()
    for _ in range(200):
        shared.call("echo", torch.zeros(30_000))
    assert descriptors() == before


def test_a_killed_parent_leaves_no_orphan() -> None:
    with script("wait_as_parent()", stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(lives, pids))
        parent.kill()
        parent.wait(10)
    wait_until(lambda: not any(map(lives, pids)))


def test_a_process_that_was_lost_or_forgotten_leaves_neither_words_nor_itself() -> None:
    done = script("kill_one_leave_one()", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words, errors = done.communicate(timeout=2 * START_S)
    assert errors == "" and done.returncode == 0
    assert not lives(int(words))


def script(line: str, **options: Any) -> subprocess.Popen:
    """Another Python that runs one line of the fakes' module."""
    module = "testing.fake_engines_for_processes"
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import *\n"
    return subprocess.Popen([sys.executable, "-c", code + line], **options)


def resident_mb_of(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
