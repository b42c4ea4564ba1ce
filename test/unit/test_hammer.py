"""The hammer: which threads it stops, that a seed repeats, and a run that ends in order."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testing.hammer import LONGEST_S, MOST_FIRST_S, MOST_STOPS_S, OWN_LONGEST_S, STOPS_SHARE, Hammer
from testing.hammered_run import Outcomes, run_once

ROOT = Path(__file__).parents[2]
Stops = dict[str, list[float]]


def stops_of(seed: int, test: str, work: Callable[[], object]) -> Stops:
    """Stops of this thread and of two others that do the same, by their names."""
    stops: Stops = {"own": [], "qwen3-omni-thinker": [], "server": []}

    def stop(seconds: float) -> None:
        name = threading.current_thread().name
        stops["own" if name == threading.main_thread().name else name].append(seconds)

    hammer, before = Hammer(seed, stop), sys.gettrace()
    hammer.begin(test)
    hammer._stopped_s = -1e9  # as many stops as are drawn
    waiting = threading.Event()
    beside = threading.Thread(target=waiting.wait, args=(60,))  # alone, this thread is not stopped
    beside.start()
    hooked = threading._trace_hook  # type: ignore[attr-defined]
    threading.settrace(hammer.trace)
    sys.settrace(hammer.trace)
    try:
        work()
        sys.settrace(before)
        for name in list(stops)[1:]:
            thread = threading.Thread(target=work, name=name)
            thread.start()
            thread.join()
    finally:
        sys.settrace(before)
        threading.settrace(hooked)
        waiting.set()
        beside.join()
    return stops


def many_lines() -> None:
    total = 0
    for number in range(8000):
        total += number


def lines_of_others() -> None:
    for _ in range(200):
        json.dumps({"a": [{"b": 1}]}, indent=1)


def test_every_thread_stops_as_long_as_its_kind_may() -> None:
    stops = stops_of(1, "a", many_lines)
    for name, (least_s, most_s) in {
        "own": OWN_LONGEST_S,
        "qwen3-omni-thinker": LONGEST_S,
        "server": LONGEST_S,
    }.items():
        assert len(stops[name]) > 20
        assert 0.8 * least_s < max(stops[name]) < most_s


def test_the_same_seed_stops_each_thread_in_the_same_way_and_another_does_not() -> None:
    found = stops_of(1, "a", many_lines)
    assert stops_of(1, "a", many_lines) == found
    assert len({tuple(one) for one in found.values()}) == 3
    for other in (stops_of(2, "a", many_lines), stops_of(1, "b", many_lines)):
        assert all(other[name] != found[name] for name in found)


def test_lines_of_other_packages_go_on() -> None:
    """`lines_of_others` itself has 400, the library that it calls many times as many."""
    found, more = stops_of(3, "a", lines_of_others), stops_of(3, "a", many_lines)
    assert all(len(found[name]) < len(more[name]) / 8 for name in found)


def test_stops_take_no_more_than_a_share_of_a_test(request: pytest.FixtureRequest) -> None:
    stops: list[float] = []
    hammer = Hammer(0, stops.append)
    hammer.begin("a")
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,))
    thread.start()
    request.addfinalizer(end.set)
    start_s = time.monotonic()
    for _ in range(1000):
        hammer.stop(0.001)
    assert 0 < sum(stops) < MOST_FIRST_S + STOPS_SHARE * (time.monotonic() - start_s)
    hammer._start_s -= 1e9
    for _ in range(1000):
        hammer.stop(0.1)
    assert sum(stops) == pytest.approx(MOST_STOPS_S, abs=0.2)


FILE = """
import threading, time

def test_right():
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    thread.join()

def test_wrong():
    raise ValueError
"""


@pytest.mark.release
def test_what_failed_is_named_with_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").touch()  # names of tests begin here, wherever the project lies
    file = tmp_path / "test_few.py"
    file.write_text(FILE)
    monkeypatch.chdir(ROOT)
    found = run_once([str(file)], 7, time.time() + 3600)
    assert found == {"test_few.py::test_right": "passed", "test_few.py::test_wrong": "failed"}
    assert "raise ValueError" in capsys.readouterr().out
    outcomes = Outcomes()
    outcomes.add(7, found)
    outcomes.add(8, found)
    assert outcomes.status == 1
    assert str(outcomes) == (
        "hammered: 2 failed, 2 passed\n"
        "  failed 2 times: test_few.py::test_wrong\n"
        "      make test-hammer TESTS='test_few.py::test_wrong' SEED=7"
    )


@pytest.mark.release
def test_a_run_ends_between_tests_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").touch()  # names of tests begin here, wherever the project lies
    file = tmp_path / "test_few.py"
    file.write_text(FILE)
    monkeypatch.chdir(ROOT)
    assert len(run_once([str(file)], 7, time.time() - 1)) == 1
