"""Checkpoints on the hubs: docs/options.md says what `inspect` shows of them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.released import SPEAKS, open_config, released_config
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import expected_bytes
from qwen3_omni_neuron.errors import CheckpointError
from testing.hub_checkpoints import HUB_CHECKPOINTS
from testing.imports import ROOT
from testing.native_library import needs_c
from testing.released import RELEASED
from testing.repeats import again

DTYPES = ("mixed", "int8", "int4")


def rows() -> dict[str, list[str]]:
    """Return the cells of the table in docs/options.md, by checkpoint."""
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| checkpoint \|.*\n\| ---.*\n((?:\|.*\n)+)", text)
    cells = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    return {name.split("`")[1]: row for name, *row in cells}


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def form_and_use(shown: dict[str, Any]) -> list[str]:
    """Return what is quantised and how, and what becomes of it: the first cells of a row."""
    quantised = [row for row in shown["tensors"] if row["dtypes int8, int4"]]
    if not quantised:
        return ["bfloat16", "rounded"]
    parts = ", ".join(row["part"].replace("_", " ") for row in quantised)
    cells = {
        (
            f"{row['form']}, {row['bits']} bits, a scale for {row['a scale for']}: {parts}",
            row["dtypes int8, int4"],
        )
        for row in quantised
    }
    assert len(cells) == 1
    return list(cells.pop())


def test_the_table_has_every_checkpoint() -> None:
    assert rows().keys() == HUB_CHECKPOINTS.keys()


@needs_c  # without it `auto` is `mixed`
@pytest.mark.parametrize("name", HUB_CHECKPOINTS)
def test_a_checkpoint_is_read_in_the_form_that_the_table_says(name, tmp_path, capsys) -> None:
    """By its headers, with the published names and all widths, in three layers."""
    HUB_CHECKPOINTS[name].write(tmp_path, layers=3)
    shown = inspected(tmp_path, capsys)
    assert [*form_and_use(shown), f"`{shown['dtype auto on the CPU']}`"] == rows()[name][:3]


@pytest.mark.parametrize("name", [again(n) for n in HUB_CHECKPOINTS])
def test_a_checkpoint_takes_the_memory_that_the_table_says(name, tmp_path) -> None:
    """By its headers, in all layers. Its tensors are as large as its files are said to be."""
    checkpoint = HUB_CHECKPOINTS[name]
    size = checkpoint.write(tmp_path) / 1e9
    assert size == pytest.approx(checkpoint.reported_gb or size, abs=0.1)
    config, found = read_config(tmp_path), []
    for dtype in DTYPES:
        plan = make_plan(tmp_path, config, LIMITS, dtype=dtype)
        found.append(f"{sum(expected_bytes(plan, model) for model in MODELS) / 1e9:.1f}")
    assert found == rows()[name][3:]


@pytest.fixture
def no_hub(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)


def test_the_released_settings_are_those_of_instruct() -> None:
    assert released_config() == RELEASED


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("hub_id", SPEAKS)
def test_a_released_checkpoint_is_read_without_the_hub(hub_id) -> None:
    with open_config(hub_id) as folder:
        config = read_config(folder)
        raw = json.loads((folder / "config.json").read_text())
    assert not folder.exists()
    assert config == released_config(hub_id)
    assert config.thinker == RELEASED.thinker
    assert raw["enable_audio_output"] is (config.talker is not None)
    assert (config.talker, config.code2wav) == (
        (RELEASED.talker, RELEASED.code2wav) if hub_id.endswith("Instruct") else (None, None)
    )


@pytest.mark.usefixtures("no_hub")
def test_another_hub_id_needs_the_hub_and_a_folder_comes_first(checkpoint) -> None:
    with pytest.raises(ImportError, match="huggingface_hub"), open_config("someone/omni"):
        pass
    with pytest.raises(CheckpointError, match="does not exist"), open_config("no folder"):
        pass
    folder = Path("Qwen/Qwen3-Omni-30B-A3B-Captioner")
    folder.parent.mkdir()
    folder.symlink_to(checkpoint)
    with open_config(str(folder)) as found:
        assert read_config(found) == read_config(checkpoint)


@pytest.mark.usefixtures("no_hub")
def test_a_dry_run_of_a_hub_id_for_the_cpu_reads_no_weights(capsys) -> None:
    words = ["compile", "--model", "Qwen/Qwen3-Omni-30B-A3B-Thinking", "--dry-run"]
    assert cli.main([*words, "--target", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "thinker  mixed" in printed.out
    assert printed.err == ""
