"""The comparison with OpenVINO, without OpenVINO: what is measured, and what is refused."""

import sys
from pathlib import Path

import pytest

from bench import vs_openvino
from testing.results import load_results

FIGURES = {"load_s", "first_reply_s", "reply_s", "first_text_s", "first_sample_s", "token_s"}
FIGURES |= {"prefill_s", "loaded_mb", "peak_mb"}


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.release
def test_both_sides_are_measured_in_processes_of_their_own(tmp_path) -> None:
    """OpenVINO's place is taken by our own side, its export by a copy of the checkpoint."""
    environment = tmp_path / "environment"
    executable(environment / "bin" / "python", f"exec {sys.executable} -m bench.peers.ours")
    export = 'test "$*" = "export openvino --model $4 --task text-to-audio --weight-format fp32 $9"'
    executable(environment / "bin" / "optimum-cli", f'{export} && cp -r "$4" "$9"')
    file = tmp_path / "result.json"
    arguments = ["--dtypes", "float32", "--text-tokens", "3", "--frames", "4", "--repeats", "1"]
    arguments += ["--processes", "1", "--long-prompt", "60", "--environment", str(environment)]
    assert vs_openvino.main([*arguments, "--json", str(file)]) == 0
    found = load_results(file)
    assert found.benchmark == "vs_openvino"
    assert [(row["dtype"], row["side"]) for row in found.rows] == [
        ("float32", "ours"),
        ("float32", "openvino"),
    ]
    for row in found.rows:
        assert row.keys() == {"dtype", "side", "process", "load_average"} | FIGURES
        assert all(row[figure] > 0 for figure in FIGURES)
        assert row["first_text_s"] < row["reply_s"]
        assert row["loaded_mb"] <= row["peak_mb"]
    ours, theirs = found.rows
    summary = found.summary["float32"]
    assert summary["ours"] == {figure: ours[figure] for figure in FIGURES}
    assert summary["ratios"]["reply_s"] == pytest.approx(theirs["reply_s"] / ours["reply_s"])
    models = environment / "models"
    assert {folder.name for folder in models.iterdir()} == {
        "tiny-checkpoint",
        "tiny-openvino-float32",
        "tiny-ours-float32",
    }
