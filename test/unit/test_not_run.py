"""The summary of the proofs that a run of the tests left out."""

import os
import subprocess
import sys
from pathlib import Path

from testing.imports import ROOT
from testing.names import index
from testing.not_run import COMMANDS, HARMLESS, summary

HLO = "torch_xla is not installed: nothing was lowered"


def test_skips_become_a_line_a_proof() -> None:
    lines = summary([HLO, HLO, HARMLESS[0], "the moon is full"])
    assert lines == [
        "    2 skipped: graphs lowered to HLO. To run: make test-hlo",
        "    1 skipped: the moon is full. To run: no command: see testing/not_run.py",
    ]


def test_every_reason_stands_in_a_test() -> None:
    """And none is left over here."""
    own = ("testing/not_run.py", "test/unit/test_not_run.py")
    names = [name for name in index().paths if name.startswith("test") and name.endswith(".py")]
    files = [ROOT / name for name in names if name not in own]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not [text for text in (*COMMANDS, *HARMLESS) if text not in sources]


def test_the_run_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n"
        f"def test_it():\n    pytest.skip({HLO!r})\n\n"
        "@pytest.mark.diagonal\n"
        "@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [1, 2])\n"
        "def test_product(a, b):\n    pass\n\n"
        "@pytest.mark.repeats\ndef test_again():\n    pass\n\n"
        "@pytest.mark.release\ndef test_script():\n    pass\n",
        encoding="utf-8",
    )
    words = ["-q", "-p", "testing.not_run", "-p", "testing.repeats", "-p", "xdist"]
    variables = {name: value for name, value in os.environ.items() if name != "TEST_ALL"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--numprocesses", "2", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "1 skipped: graphs lowered to HLO. To run: make test-hlo" in done.stdout, done.stdout
    assert (
        "4 left out: shown by others, too, or for a release. To run: make test-all" in done.stdout
    )
    assert "2 passed, 1 skipped" in done.stdout
