"""serve_soak.py: a short run, what its hostile clients send, and what it counts as met."""

from collections import Counter
from pathlib import Path

import pytest

from test.hostile import serve_soak, slots
from test.hostile.serve_soak import Run, growth_of
from test.hostile.soak.clients import TALKS
from test.hostile.soak.gate import Gate
from testing.results import load_results

on_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="no /proc, which Linux has"
)
MET, NOT_MEASURED = "met", "not measured"


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
    clients = ["--clients", "2", "--realtime", "1", "--threads", "1"]
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
