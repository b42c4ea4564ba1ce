"""The summary of the proofs that a run of the tests left out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing.imports import ROOT
from testing.names import index
from testing.not_run import COMMANDS, HARMLESS, summary

HLO = "torch_xla is not installed: nothing was lowered"


def test_skips_become_a_line_a_proof() -> None:
    lines = summary([HLO, HLO, "this is neuron/, which may", "the moon is full"])
    assert lines == [
        "    2 skipped: graphs lowered to HLO. To run: make test-hlo",
        "    1 skipped: the moon is full. To run: no command: see testing/not_run.py",
    ]


def test_nothing_left_out_says_nothing() -> None:
    assert summary([]) == summary(["this is neuron/, which may"]) == []


def test_the_commands_are_make_targets() -> None:
    for _, command in COMMANDS.values():
        assert set(re.findall(r"make ([a-z][\w-]*)", command)) <= index().targets, command


def test_every_reason_stands_in_a_test() -> None:
    """And none is left over here."""
    own = ("testing/not_run.py", "test/unit/test_not_run.py")
    files = [ROOT / name for name in index().sources if name.startswith("test") and name not in own]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not [text for text in (*COMMANDS, *HARMLESS) if text not in sources]


def test_the_run_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n\ndef test_it():\n    pytest.skip({HLO!r})\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "testing.not_run", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 skipped: graphs lowered to HLO. To run: make test-hlo" in done.stdout, done.stdout


@pytest.mark.parametrize("reason", [HLO, "no neuronx_distributed here: set NXDI_SOURCES"])
def test_the_proofs_for_neuron_have_commands(reason: str) -> None:
    assert "make test-" in summary([reason])[0]
