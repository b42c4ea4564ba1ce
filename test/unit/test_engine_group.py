"""Processes that make every call together: one that ends, stops, fails or hangs ends them all."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from qwen3_omni_neuron.errors import ClosedError, EngineDiedError
from qwen3_omni_neuron.process.engine_group import EngineGroup
from testing.fake_ranks import BIG, KILL, STOP, FakeRank


def group_of(size: int, refuses: int = -1) -> EngineGroup:
    return EngineGroup(
        [f"rank {number} of {size}" for number in range(size)],
        [partial(FakeRank, number, refuses) for number in range(size)],
        [{}] * size,
    )


@pytest.fixture
def group() -> Iterator[EngineGroup]:
    made = group_of(2)
    made.wait_ready(60)
    yield made
    made.close()
    for pid in made.pids:
        assert not Path(f"/proc/{pid}").exists(), "no process is left"


def test_all_get_the_same_and_the_first_answers() -> None:
    group = group_of(3)
    group.wait_ready(60)
    assert group.call("total", BIG) == (0, 200_000.0)
    assert group.call("total", 2 * BIG[:10]) == (0, 20.0)
    with pytest.raises(ValueError, match="no 0"):
        group.call("fail")
    assert group.call("total", BIG) == (0, 200_000.0), "what all raise ends nothing"
    group.close()
    with pytest.raises(ClosedError, match="were closed"):
        group.call("total", BIG)


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("end", (0, KILL), r"rank 0 of 2 .*SIGKILL"),
        ("end", (1, STOP), r"rank 1 of 2 .*was stopped by a signal"),
        ("fail", (0,), r"rank 0 of 2 .*failed and others did not \(no 0\)"),
        ("fail_or_wait", (1,), r"rank 1 of 2 .*failed and others did not \(no 1\)"),
    ],
)
def test_one_that_does_not_go_on_is_named_within_a_second(
    group: EngineGroup, method: str, arguments: tuple[int, ...], said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=said):
        group.call(method, *arguments)
    assert time.monotonic() - started < 1
    with pytest.raises(EngineDiedError, match=said):
        group.call("total", BIG)


def test_one_that_does_not_answer_is_named(group: EngineGroup) -> None:
    with pytest.raises(EngineDiedError, match=r"rank 1 of 2 .*did not answer within 0.3 s"):
        group.call("hang", 1, timeout_s=0.3)


def test_one_that_can_not_be_built_fails_the_load_at_once() -> None:
    started, refused = time.monotonic(), group_of(2, refuses=1)
    with pytest.raises(ValueError, match="rank 1 was not built"):
        refused.wait_ready(60)
    assert time.monotonic() - started < 30
    for pid in refused.pids:
        assert not Path(f"/proc/{pid}").exists()
