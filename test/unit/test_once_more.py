"""Failed tests that run once more in CI: which of them fail it, and what is printed of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.once_more import MOST_TESTS, REPORT

ROOT = Path(__file__).parents[2]
TOY = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range(COUNT))
def test_moment(number):
    first = not (seen := Path(f"seen{number}")).exists()
    seen.touch()
    print("the first time" if first else "the second time")
    assert not first or not 1 / 0


def test_right():
    assert RIGHT
"""


def run_once_more(folder: Path, count: int, right: bool = True) -> int:
    """Return the exit status of a run in a folder. count: tests that fail the first time."""
    toy = TOY.replace("COUNT", str(count)).replace("RIGHT", str(right))
    (folder / "test_toy.py").write_text(toy, encoding="utf-8")
    command = [sys.executable, "-m", "testing.once_more", "--quiet"]
    alone = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=os.environ | alone, check=False).returncode


@pytest.mark.parametrize(
    ("count", "right", "status"),
    [(0, True, 0), (1, True, 0), (MOST_TESTS + 1, True, 1), (1, False, 1)],
)
def test_failed_tests_that_pass_alone_do_not_fail_a_run_and_are_reported(
    tmp_path: Path, count: int, right: bool, status: int
) -> None:
    assert run_once_more(tmp_path, count, right) == status
    report, repeated = tmp_path / REPORT, count + (not right)
    text = report.read_text(encoding="utf-8") if report.exists() else ""
    tells = count if repeated <= MOST_TESTS else 0
    assert text.count("depends on its moment") == text.count("ZeroDivisionError:") == tells
    assert text.count("fails alone, too") == (not right)
    assert text.count("1 passed") == tells
