"""Files of a checkpoint that contradict each other or have wrong numbers are refused by name."""

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, fingerprint
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.builder import PromptBuilder


def edited(folder: Path, into: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a checkpoint, with a change of a file of JSON. Returns the copy."""
    copy = Path(shutil.copytree(folder, into / "copy"))
    document = json.loads((copy / name).read_text())
    change(document)
    (copy / name).write_text(json.dumps(document).replace('"1e400"', "1e400"))
    return copy


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("thinker_config.text_config", "num_hidden_layers", 10**9, "from 1 to 256"),
        ("thinker_config.text_config", "vocab_size", 2**40, "from 1 to 2097152"),
        ("thinker_config.text_config", "num_attention_heads", 0, "from 1 to 1024"),
        ("thinker_config.text_config", "num_attention_heads", 3, "multiple of num_key_value"),
        ("thinker_config.text_config", "num_experts", 1024, None),
        ("thinker_config.text_config", "rope_theta", "1e400", "must be a number above 0"),
        ("thinker_config.text_config", "rope_scaling", 3, "rope_scaling is not an object"),
        ("thinker_config.audio_config", "n_window_infer", 801, "multiple of twice n_window"),
        ("talker_config.text_config", "hidden_size", True, "from 1 to 131072"),
        ("talker_config", "thinker_hidden_size", 65, "they must be equal"),
        ("code2wav_config", "upsample_rates", [64] * 8, "65536 samples a frame"),
    ],
)
def test_a_number_of_a_config_is_refused_by_its_name(
    checkpoint: Path, tmp_path: Path, section: str, field: str, value: Any, message: str | None
) -> None:
    def change(document: dict[str, Any]) -> None:
        owner = reduce(lambda inner, name: inner[name], section.split("."), document)
        owner[field] = value

    copy = edited(checkpoint, tmp_path, "config.json", change)
    if message is None:  # a possible size: what is stored differs
        parts = lay_out(read_config(copy), ("thinker",))[1]
        with pytest.raises(CheckpointError, match="lacks 9144 parameters"):
            check_names([*parts.values()], Checkpoint(copy))
        return
    with pytest.raises(CheckpointError, match=rf"config.json.*{message}") as refused:
        read_config(copy)
    assert field in str(refused.value) or value == "1e400"


@pytest.mark.parametrize("file", ["../config.json", "..", "a/b", "", "a\nb", 7, None, ["x"]])
def test_a_shard_is_a_file_of_its_folder(checkpoint: Path, tmp_path: Path, file: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        document["weight_map"]["thinker.lm_head.weight"] = file

    copy = edited(checkpoint, tmp_path, "model.safetensors.index.json", change)
    for read in (Checkpoint, fingerprint):
        with pytest.raises(CheckpointError, match="its weight_map has"):
            read(copy)


@pytest.mark.parametrize(
    ("field", "value"), [("feature_size", 80), ("patch_size", 14), ("merge_size", 4)]
)
def test_a_preprocessor_of_another_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, field: str, value: int
) -> None:
    name = "preprocessor_config.json"
    copy = edited(checkpoint, tmp_path, name, lambda document: document.update({field: value}))
    with pytest.raises(CheckpointError, match=f"{field}.*They belong to different checkpoints"):
        PromptBuilder(copy, read_config(copy))
