"""Kinds of checkpoints that people have of the model and that are not read."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from qwen3_omni_neuron.checkpoint.json_files import reason
from qwen3_omni_neuron.errors import CheckpointError, printable

NOT_READ = {
    "GGUF": "files of llama.cpp, with numbers, names and settings of their own",
    "MLX": "4 or 8 bits in words of MLX's own order, with scales and biases",
    "a checkpoint in folders": "thinker, talker and code2wav each have a folder and a config.json",
}
"""Why each kind is not read."""
_THINKER = "thinker/config.json"


def refused(named: str | Path, kind: str) -> CheckpointError:
    """Return the error for a checkpoint of a kind that is not read. kind: of NOT_READ."""
    return CheckpointError(
        f"{named} is {kind}: {NOT_READ[kind]}. It is not read. Take a folder of safetensors, in "
        "bfloat16 or quantised as docs/options.md lists, such as "
        "cyankiwi/Qwen3-Omni-30B-A3B-Instruct-AWQ-4bit."
    )


def refuse_local(path: Path) -> None:
    """Raise CheckpointError for a file or a folder that `refuse_files` refuses.

    And for a path that can't be looked up: it is too long, or its folder is not to be read.
    """
    try:
        files = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
        in_folders = (path / _THINKER).exists()
    except OSError as error:
        raise CheckpointError(
            f"{printable(str(path), 200)} can't be looked up: {reason(error)}. Name a checkpoint's "
            "folder, or a hub id."
        ) from error
    refuse_files(path, [*files, _THINKER] if in_folders else files)


def refuse_files(named: str | Path, files: Iterable[str]) -> None:
    """Raise CheckpointError for GGUF and a checkpoint in folders, which have no safetensors.

    files: paths in the checkpoint's folder.
    """
    paths = [PurePosixPath(name) for name in files]
    if any(path.suffix == ".safetensors" and path.name == str(path) for path in paths):
        return
    if any(path.suffix == ".gguf" for path in paths):
        raise refused(named, "GGUF")
    if PurePosixPath(_THINKER) in paths:
        raise refused(named, "a checkpoint in folders")


def refuse_mlx(named: str | Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a config.json whose numbers MLX has packed.

    Its settings have no method. Older files have them under "quantization" alone.
    """
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping) or "quant_method" in settings:
        return
    if {"bits", "group_size"} <= settings.keys():
        raise refused(named, "MLX")
