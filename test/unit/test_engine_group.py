"""Processes that make every call together: one that ends, fails or hangs ends them all."""

import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.engines.process.engine_process import EngineGroup
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError
from testing.fake_engines_for_processes import FakeRank
from testing.subprocesses import wait_until

AT_ONCE_S = 20.0  # on a busy machine; a rank that waits would wait for 60 s
BIG = torch.ones(200_000)


def group_of(size: int, refuses: int = -1) -> EngineGroup:
    return EngineGroup(
        [f"rank {number} of {size}" for number in range(size)],
        [partial(FakeRank, number, refuses) for number in range(size)],
        [{}] * size,
    )


@pytest.fixture
def group() -> Iterator[EngineGroup]:
    made = group_of(3)
    made.wait_ready(300)
    yield made
    made.close()
    for pid in made.pids:
        assert not Path(f"/proc/{pid}").exists(), "no process is left"


def test_all_get_the_same_and_the_first_answers(group) -> None:
    assert group.call("total", BIG) == (0, 200_000.0)
    assert group.call("total", 2 * BIG[:10]) == (0, 20.0)
    with pytest.raises(ValueError, match="no 0"):
        group.call("fail")
    with pytest.raises(ValueError, match="no 0"):
        group.call("fail", 0, members=1)
    assert group.call("total", BIG) == (0, 200_000.0), "what all raise ends nothing"
    group.close()
    assert group.fault() is None
    with pytest.raises(ClosedError, match="were closed"):
        group.call("total", BIG)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("end", r"rank 1 of 3 .*SIGKILL"),
        ("fail", r"rank 1 of 3 .*failed and others did not \(no 1\)"),
        ("fail_or_wait", r"rank 1 of 3 .*failed and others did not \(no 1\)"),
        ("hang", r"The rank 1 of 3 engine \(process \d+\) did not finish 'hang' within 0\.5 s"),
    ],
)
def test_one_that_does_not_go_on_is_named_at_once(group, method, said) -> None:
    started = time.monotonic()
    for name in (method, "total"):
        with pytest.raises(EngineDiedError, match=said):
            group.call(name, 1, limit_s=0.5 if method == "hang" else 60)
    assert time.monotonic() - started < AT_ONCE_S


def test_one_that_ends_between_two_calls_is_found_by_a_look_and_ends_all(group) -> None:
    assert group.fault() is None
    os.kill(group.pids[1], 9)
    assert re.search("rank 1 of 3 .*SIGKILL", str(wait_until(group.fault)))
    for process in group._processes:
        process.popen.wait(60)
    with pytest.raises(EngineDiedError, match="rank 1 of 3"):
        group.call("total", BIG)


def test_one_that_can_not_be_built_fails_the_load_at_once() -> None:
    refused = group_of(2, refuses=1)
    with pytest.raises(ValueError, match="rank 1 was not built"):
        refused.wait_ready(300)  # else an EngineDiedError: the other one waits for longer
    for pid in refused.pids:
        assert not Path(f"/proc/{pid}").exists()
