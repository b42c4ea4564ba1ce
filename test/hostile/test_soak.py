"""serve_soak.py: a short run, what its hostile clients send, and what it counts as met."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from qwen3_omni_neuron import Qwen3Omni
from test.hostile import serve_soak, slots
from test.hostile.serve_soak import Run, growth_of, restart_s, summary
from test.hostile.soak import hostile
from test.hostile.soak.clients import TALKS
from test.hostile.soak.gate import Gate
from test.hostile.soak.hostile import HOSTILE, Hostile, is_answer, png
from test.hostile.soak.processes import descendants, left_of, measured
from testing.http_server import serving, url_of
from testing.results import load_results

on_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="no /proc, which Linux has"
)
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"


@on_linux
@pytest.mark.release
@pytest.mark.usefixtures("warm_commands")
def test_a_short_soak_kills_a_stage_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Full KV caches and settled threads matter to the figure of memory, which is not measured here.
    monkeypatch.setattr(slots, "ROWS", 100)
    monkeypatch.setattr(serve_soak, "SETTLE_S", 0.2)
    file = tmp_path / "soak.json"
    arguments = ["--minutes", "0.1", "--kill-every-minutes", "0.05", "--idle-every-minutes", "0.05"]
    clients = ["--clients", "2", "--realtime", "1", "--hostile", "0", "--threads", "1"]
    assert serve_soak.main([*arguments, *clients, "--json", str(file)]) == 0
    found = load_results(file).summary
    first, second = found["runs"]
    assert (first["killed"], first["status"]) == ("thinker", 70)
    assert (second["killed"], second["status"]) == (None, 0)
    assert second["idle_points"] > 0
    goals = found["goals"]
    (memory,) = [goals.pop(goal) for goal in list(goals) if "memory" in goal]
    assert memory == NOT_MEASURED
    # Files that a server opens late are more in a run of seconds.
    del goals["no more threads, files or processes at the last idle point"]
    assert set(goals.values()) == {MET}, found
    answered = {name.partition(":")[0] for name in found["counts"]}
    assert answered & {f"realtime {kind}" for kind in TALKS}
    assert answered & {"chat whole", "chat streamed", "speech", "transcription"}


@pytest.mark.parametrize("what", HOSTILE, ids=lambda what: what.__name__)
def test_what_hostile_clients_send_is_answered_or_closed(
    omni: Qwen3Omni, what: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "SLOW_S", 0.5)
    with serving(omni, model_name="load", header_timeout_s=0.5) as server:
        outcome = what(url_of(server), "127.0.1.1", random.Random(1))
        assert is_answer(outcome), outcome
        right = {"half_open": "closed", "slow_reader": "left"}
        assert outcome == right.get(what.__name__, outcome)


def test_bombs_are_small() -> None:
    assert len(png(12_000)) < 30_000


def test_errors_of_a_killed_server_are_not_wrong_and_others_are() -> None:
    gate = Gate()
    gate.open("http://a")

    def fails(url: str) -> str:
        raise OSError("gone")

    assert gate.visit("asks", fails, "right".__eq__)
    assert gate.visit("asks", lambda url: "right", "right".__eq__)
    assert gate.wrong == Counter({"asks: OSError: gone": 1})
    gate.killed()
    assert gate.visit("asks", fails, "right".__eq__)
    gate.open("http://b")
    assert gate.visit("asks", fails, "right".__eq__)
    assert gate.wrong.total() == 2
    assert gate.counts["asks: cut by a killed stage"] == 1
    gate.end()
    assert not gate.visit("asks", fails, "right".__eq__)


def test_a_closed_gate_waits_for_those_inside_and_lets_nobody_in() -> None:
    gate, inside, leave = Gate(), threading.Event(), threading.Event()
    done: list[str] = []

    def stays(url: str) -> str:
        inside.set()
        assert leave.wait(60)
        done.append("first")
        return "left"

    def enters(url: str) -> str:
        done.append("second")
        return ""

    gate.open("http://a")
    first = threading.Thread(target=gate.visit, args=("stays", stays, "left".__eq__))
    first.start()
    assert inside.wait(60)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(gate.close()))
    closing.start()
    leave.set()
    closing.join()
    assert closed == [True]
    assert done == ["first"]
    second = threading.Thread(target=gate.visit, args=("late", enters, "".__eq__))
    second.start()
    time.sleep(0.05)
    assert done == ["first"]
    gate.open("http://b")
    second.join()
    assert done == ["first", "second"]


@on_linux
def test_processes_are_seen_until_they_have_ended() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while len(found := descendants(parent.pid)) < 1:
            time.sleep(0.01)
        held = measured(parent.pid)
        assert held["children"] == 1
        assert held["threads"] >= 2
        assert held["open_files"] >= 6
        assert held["memory_mb"] > 1
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait(60)
        assert left_of(found) == []
    finally:
        parent.kill()


def points(*values: tuple[float, float], **more: float) -> list[dict[str, float]]:
    free = dict.fromkeys(serve_soak.LEFT, 0.0) | {"stuck": 0, "threads": 9, "open_files": 9}
    free["children"] = 3
    return [{"at_minutes": m, "memory_mb": mb, **free, **more} for m, mb in values]


def test_growth_is_the_slope_of_all_runs_lines() -> None:
    def run_of(*values: tuple[float, float]) -> Run:
        return Run(0, points(*((60 * hours, mb) for hours, mb in values)), 4.0)

    straight = run_of((1, 15), (2, 25), (3, 35))
    assert growth_of([straight]) == (pytest.approx(10), pytest.approx(0, abs=1e-9))
    found, error = growth_of([run_of((1, 0), (2, 11), (3, 19), (4, 31), (5, 39))])
    assert found == pytest.approx(9.8)
    assert error == pytest.approx(0.2 * 2.0, rel=0.3)
    # Each run has its own beginning, and a short one counts less.
    assert growth_of([straight, run_of((1, 900), (2, 910), (3, 920))])[0] == pytest.approx(10)
    assert growth_of([straight, run_of((1, 900), (2, 915))])[0] == pytest.approx(11)
    assert growth_of([run_of((1, 900), (2, 915))]) == growth_of([]) == (None, None)


def test_goals_say_what_is_met() -> None:
    def goals(one: Run, gate: Gate | None = None, log: Counter[str] | None = None) -> list[str]:
        return [*summary([one], gate or Gate(), log or Counter(), 0, ())["goals"].values()]

    # The first quarter does not count: it grew by 50 MB, the rest by 8 MB an hour.
    flat = points((1, 50), (5, 100), (10, 100.67), (15, 101.33))
    assert goals(Run(0, flat, 15.0, 70, "talker")) == 7 * [MET]
    assert goals(Run(0, points((5, 0), (10, 1), (15, 2)), 15.0, 0))[0] == NOT_MET
    assert goals(Run(0, flat[:3], 15.0, 0))[0] == NOT_MEASURED
    assert goals(Run(0, points((5, 1), slots_used=1), 15.0, 0))[1] == NOT_MET
    more = flat[:3] + points((15, 101), open_files=10)
    assert goals(Run(0, more, 15.0, 0))[2] == NOT_MET
    assert goals(Run(0, flat, 15.0, 0, processes_left=1))[3] == NOT_MET
    assert goals(Run(0, flat, 15.0, 70))[4] == NOT_MET
    wrong = Gate(wrong=Counter({"chat: 'six' for 'eight'": 1}))
    assert goals(Run(0, flat, 15.0, 0), wrong)[5] == NOT_MET
    assert goals(Run(0, flat, 15.0, 0), log=Counter({"failed": 1}))[6] == NOT_MET


def test_a_server_starts_anew_when_its_unit_says() -> None:
    assert restart_s() == 2
