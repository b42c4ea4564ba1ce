"""A run of pytest that runs what failed once more, alone: python -m testing.once_more ARGUMENTS.

Failed tests that pass then depend on their moment. Up to MOST_TESTS of them, over all runs that add
to REPORT, do not fail a run. `.ci/run` begins a report, and prints it: both outputs of each test.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST_TESTS = 3
REPORT = Path("build/once_more.txt")
_PASSED, _FAILED = "depends on its moment: mend it", "fails alone, too"


class _Failed:
    """A plugin that keeps the output of each failed test, by its id."""

    def __init__(self) -> None:
        self.outputs: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            parts = [report.longreprtext, *map("\n".join, report.sections)]
            earlier = self.outputs.get(report.nodeid, "")
            self.outputs[report.nodeid] = "\n".join([earlier, *parts])


def main(arguments: Sequence[str]) -> int:
    """Run pytest, then what failed.

    Returns pytest's exit status, 0 if all failed tests passed and the report has no more than
    MOST_TESTS of them.
    """
    failed = _Failed()
    status = int(pytest.main([*arguments], plugins=[failed]))
    outputs = failed.outputs
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(outputs) <= MOST_TESTS:
        return status
    statuses = []
    REPORT.parent.mkdir(exist_ok=True)
    for test, first in outputs.items():
        command = [sys.executable, "-m", "pytest", test]
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        statuses.append(again.returncode)
        found = _FAILED if again.returncode else _PASSED
        with REPORT.open("a", encoding="utf-8") as report:
            report.write(f"\n{test} {found}\nFirst:{first}\nAlone:\n{again.stdout}{again.stderr}")
    # Read after it was added to: of two runs at a time one at least sees what both have added.
    if REPORT.read_text(encoding="utf-8").count(_PASSED) > MOST_TESTS:
        return status
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
