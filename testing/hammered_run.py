"""The suite, or a part of it, under the hammer for some minutes: `make test-hammer`.

    python -m testing.hammered_run --minutes 10 [--seed N] test/unit/test_pipeline.py

Two runs of pytest go on beside each other. One that has seen all of its tests begins again with
another seed. After the time both stop between two tests. Each failed test is named with the seed
that disturbs it in the same way.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SIDE_BY_SIDE = 2
STRIDE = 1000  # between the first seeds of both runs; each repetition adds 1
LEAST_S = 5.0  # a repetition with less time left is not started
BAD = ("failed", "running")  # a test still "running" hung, or ended its process


class Outcomes:
    """Results of tests, and the seeds with which they failed. The lock guards both."""

    def __init__(self) -> None:
        self._counts, self._failures = Counter[str](), dict[str, list[int]]()
        self._lock = threading.Lock()

    def add(self, seed: int, found: Mapping[str, str]) -> None:
        """Add a run of pytest."""
        with self._lock:
            self._counts.update(found.values())
            for name in found:
                if found[name] in BAD:
                    self._failures.setdefault(name, []).append(seed)

    @property
    def status(self) -> int:
        """The exit status: 1 where a test failed, or none ran."""
        return int(bool(self._failures) or not self._counts)

    def __str__(self) -> str:
        """Return what ran, and how to repeat what failed."""
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self._counts.items()))
        lines = [f"hammered: {counts or 'no tests'}"]
        for name, seeds in self._failures.items():
            lines.append(f"  failed {len(seeds)} times: {name}")
            lines.append(f"      make test-hammer TESTS='{name}' SEED={seeds[0]}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest until the time has passed. Returns its exit status."""
    parser = argparse.ArgumentParser("python -m testing.hammered_run", description=__doc__)
    parser.add_argument("tests", nargs="*", default=["test"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)  # noqa: T201
    outcomes, until_s = Outcomes(), time.time() + 60 * options.minutes
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        seeds = [seed + STRIDE * number for number in range(SIDE_BY_SIDE)]
        list(pool.map(lambda one: repeat(options.tests, one, until_s, outcomes), seeds))
    print(outcomes)  # noqa: T201
    return outcomes.status


def repeat(tests: Sequence[str], seed: int, until_s: float, outcomes: Outcomes) -> None:
    """Run pytest with one seed after the other, until the time has passed."""
    while True:
        start_s = time.time()
        found = run_once(tests, seed, until_s)
        outcomes.add(seed, found)
        least_s = max(LEAST_S, 0.2 * (time.time() - start_s))
        if not found or time.time() + least_s > until_s:
            return
        seed += 1


def run_once(tests: Sequence[str], seed: int, until_s: float) -> dict[str, str]:
    """Run pytest; print its output if a test failed or none ran. Returns each test's outcome."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "testing.hammer"]
        command += ["-p", "no:cacheprovider", f"--hammer-seed={seed}", f"--hammer-notes={notes}"]
        command += [f"--hammer-until={until_s}", *tests]
        env = {**os.environ, "TEST_ALL": "1"}  # processes start as they do for users
        said = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, check=False
        ).stdout
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    found: dict[str, str] = {}
    for name, outcome in map(json.loads, lines):
        if found.get(name) != "failed":  # not by what it did after its call
            found[name] = outcome
    if not found or any(outcome in BAD for outcome in found.values()):
        print(said, flush=True)  # noqa: T201
    return found


if __name__ == "__main__":
    sys.exit(main())
