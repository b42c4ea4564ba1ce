"""The hammer stops threads, repeats a seed's stops, and ends in time."""

import subprocess
import sys
import threading
from pathlib import Path

from testing.hammer import MOST_STOPS_S, Hammer
from testing.imports import ROOT


def stops_of(seed: int, test: str) -> list[float]:
    """Return the stops of a thread that waits for a lock some thousand times."""
    stops: list[float] = []
    hammer = Hammer(seed, stops.append)
    hammer.begin(test)
    hammer._start_s -= 1e9  # as many stops as are drawn
    condition = threading.Condition()

    def work() -> None:
        sys.settrace(hammer.trace)
        for _ in range(2000):
            with condition:
                condition.notify_all()
        sys.settrace(None)

    thread = threading.Thread(target=work, name="server-7")
    thread.start()
    thread.join()
    return stops


def test_the_same_seed_stops_a_thread_in_the_same_way_and_another_does_not() -> None:
    stops = stops_of(3, "a")
    assert len(stops) > 3
    assert sum(stops) <= MOST_STOPS_S
    assert stops_of(3, "a") == stops
    assert stops_of(4, "a") != stops and stops_of(3, "b") != stops


def test_a_run_names_its_seed_and_ends_when_its_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "test_few.py"
    file.write_text("def test_one(): assert 0\n\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "testing.hammer", "--hammer-seed=7"]
    command += ["--hammer-minutes=0", f"--rootdir={tmp_path}", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "hammered: SEED=7" in done.stdout
    assert "1 failed" in done.stdout or "1 passed" in done.stdout
