"""Processes that make every call together: one that ends, stops, fails or hangs ends them all."""

import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.engines.process.engine_group import CallLimit, EngineGroup, StepCounts
from qwen3_omni_neuron.errors import ClosedError, EngineDiedError
from testing.fake_ranks import BIG, KILL, STOP, FakeRank

AT_ONCE_S = 20.0  # on a busy machine; a call's own limit is 60 s


def group_of(size: int, folder: Path, refuses: int = -1) -> EngineGroup:
    files = [folder / str(number) for number in range(size)]
    return EngineGroup(
        [f"rank {number} of {size}" for number in range(size)],
        [partial(FakeRank, number, files[number], refuses) for number in range(size)],
        [{}] * size,
        [StepCounts(file) for file in files],
    )


def call(group: EngineGroup, method: str, *arguments: object) -> Any:
    return group.call(method, *arguments, limit=CallLimit(60, 60))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[EngineGroup]:
    made = group_of(2, tmp_path)
    made.wait_ready(300)
    yield made
    made.close()
    for pid in made.pids:
        assert not Path(f"/proc/{pid}").exists(), "no process is left"


def test_all_get_the_same_and_the_first_answers(group: EngineGroup) -> None:
    assert call(group, "total", BIG) == (0, 200_000.0)
    assert call(group, "total", 2 * BIG[:10]) == (0, 20.0)
    with pytest.raises(ValueError, match="no 0"):
        call(group, "fail")
    assert call(group, "total", BIG) == (0, 200_000.0), "what all raise ends nothing"
    group.close()
    assert group.fault() is None
    with pytest.raises(ClosedError, match="were closed"):
        call(group, "total", BIG)


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("end", (0, KILL), r"rank 0 of 2 .*SIGKILL"),
        ("end", (1, STOP), r"rank 1 of 2 .*was stopped by a signal"),
        ("fail", (1,), r"rank 1 of 2 .*failed and others did not \(no 1\)"),
        ("fail_or_wait", (1,), r"rank 1 of 2 .*failed and others did not \(no 1\)"),
    ],
)
def test_one_that_does_not_go_on_is_named_at_once(
    group: EngineGroup, method: str, arguments: tuple[int, ...], said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match=said):
        call(group, method, *arguments)
    assert time.monotonic() - started < AT_ONCE_S
    with pytest.raises(EngineDiedError, match=said):
        call(group, "total", BIG)


@pytest.mark.parametrize("sent", [KILL, STOP], ids=["killed", "stopped"])
def test_one_that_ends_between_two_calls_is_found_by_a_look_and_ends_all(
    group: EngineGroup, sent: int
) -> None:
    assert call(group, "total", BIG) == (0, 200_000.0)
    assert group.fault() is None
    os.kill(group.pids[1], sent)
    looks = iter(range(1000))
    while (fault := group.fault()) is None:
        assert next(looks) < 999
        time.sleep(0.01)
    assert re.search(r"rank 1 of 2 .*(SIGKILL|was stopped by a signal)", str(fault))
    for process in group._processes:
        process._process.wait(60)
    with pytest.raises(EngineDiedError, match="rank 1 of 2"):
        call(group, "total", BIG)


@pytest.mark.parametrize(
    ("method", "hanging", "place"),
    [("hang", 1, "in hang"), ("loop", 0, "in loop")],
)
def test_one_that_hangs_is_named_after_the_limit_with_where_it_is(
    group: EngineGroup, method: str, hanging: int, place: str
) -> None:
    """The others have finished, or wait for it in the same call."""
    started = time.monotonic()
    with pytest.raises(EngineDiedError) as caught:
        group.call(method, hanging, limit=CallLimit(0.5, 0.5))
    assert time.monotonic() - started < AT_ONCE_S
    assert re.fullmatch(
        rf"The rank {hanging} of 2 engine \(process \d+\) did not finish '{method}' within 0\.5 s "
        r"\(1 of 2 were further or had finished\), .*" + f"{place}\n.*",
        str(caught.value),
        re.DOTALL,
    ), caught.value


def test_a_call_for_the_first_ones_leaves_the_others_alone(tmp_path: Path) -> None:
    """Steps that only some have made count for nothing when all are called again."""
    group = group_of(3, tmp_path)
    group.wait_ready(300)
    for _ in range(3):
        group.call("count", limit=CallLimit(60, 60), members=2)
    assert [StepCounts(tmp_path / str(number)).steps for number in range(3)] == [3, 3, 0]
    with pytest.raises(ValueError, match="no 0"):
        group.call("fail", limit=CallLimit(60, 60), members=1)
    with pytest.raises(EngineDiedError, match=r"rank 0 of 3 .* \(2 of 3 were further or had fini"):
        group.call("loop", 0, limit=CallLimit(0.5, 0.5))


def test_a_limit_follows_from_the_calls_so_far() -> None:
    limit = CallLimit(first_s=1800, least_s=5)
    assert limit.seconds == 1800
    limit.add(0.0)
    limit.add(0.1)
    assert limit.seconds == 5
    limit.add(0.5)
    limit.add(0.2)
    assert limit.seconds == 10


def test_a_call_that_compiles_has_the_time_of_a_first_one(group: EngineGroup) -> None:
    limit = CallLimit(60, 0.3)
    for _ in range(2):
        group.call("compile", 0.8, limit=limit)
    assert limit.seconds == 0.3


def test_one_that_can_not_be_built_fails_the_load_at_once(tmp_path: Path) -> None:
    refused = group_of(2, tmp_path, refuses=1)
    with pytest.raises(ValueError, match="rank 1 was not built"):
        refused.wait_ready(300)  # else an EngineDiedError: the other one waits for longer
    for pid in refused.pids:
        assert not Path(f"/proc/{pid}").exists()
