"""config.json of the released checkpoints, without the hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qwen3_omni_neuron.checkpoint.config_json import parse_config
from qwen3_omni_neuron.checkpoint.files import download, local_folder
from qwen3_omni_neuron.model.config import OmniConfig

INSTRUCT = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
SPEAKS = {
    INSTRUCT: True,
    "Qwen/Qwen3-Omni-30B-A3B-Thinking": False,
    "Qwen/Qwen3-Omni-30B-A3B-Captioner": False,
}
"""Released checkpoints by hub id, and whether they have talker and code2wav."""
_SPEECH = ("talker_config", "code2wav_config")


def released_config(hub_id: str = INSTRUCT) -> OmniConfig:
    """Return a released checkpoint's settings. hub_id: a key of SPEAKS."""
    return parse_config(released_config_dict(hub_id))


def released_config_dict(hub_id: str = INSTRUCT) -> dict[str, Any]:
    """Return a released checkpoint's config.json, as transformers 4.x spells it.

    hub_id: a key of SPEAKS.
    """
    file = resources.files("qwen3_omni_neuron.checkpoint") / "released.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if SPEAKS[hub_id]:
        return config
    kept = {name: value for name, value in config.items() if name not in _SPEECH}
    return {**kept, "enable_audio_output": False}


@contextmanager
def open_config(model_path: str) -> Iterator[Path]:
    """Yield a folder with a checkpoint's config.json, perhaps with weights.

    A released hub id needs no network; others' JSON files are downloaded. Raises CheckpointError.
    """
    folder = local_folder(model_path)
    if folder is None and model_path not in SPEAKS:
        folder = download(model_path, ["*.json"])
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory() as made:
        text = json.dumps(released_config_dict(model_path))
        (Path(made) / "config.json").write_text(text, encoding="utf-8")
        yield Path(made)
