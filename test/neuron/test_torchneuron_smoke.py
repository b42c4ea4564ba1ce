"""The smoke test of docs/trn2.md, over a stand-in for TorchNeuron."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.compilation.loading import TARGETS
from testing.imports import ROOT
from testing.specs import compiled_here
from testing.torchneuron.runtime import stand_in_target


@pytest.mark.release
def test_the_smoke_test_of_the_page_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands as they are, on one core."""
    page = (ROOT / "docs" / "trn2.md").read_text(encoding="utf-8")
    block = re.search(r"test_torchneuron_smoke\.py .*?```sh\n(.*?)```", page, re.DOTALL)
    assert block
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TARGETS, "torchneuron", replace(stand_in_target(), require=lambda: None))
    monkeypatch.setattr("qwen3_omni_neuron.neuron.cores.instance_type", lambda: "trn2.3xlarge")
    for line in block[1].replace("\\\n", " ").strip().splitlines():
        words = shlex.split(line)[1:]
        with compiled_here():
            assert cli.main(words + ["--tp", "1"] * (words[0] == "compile")) == 0, line
        if words[0] == "speak":
            assert "five" in capsys.readouterr().out
    assert capsys.readouterr().out.endswith("\nHOLDS\n")
