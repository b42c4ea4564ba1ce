"""config.json of the released checkpoints, without the hub."""

import json
import sys
from pathlib import Path

import pytest

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.released import SPEAKS, open_config, released_config
from qwen3_omni_neuron.errors import CheckpointError
from testing.released import RELEASED


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
