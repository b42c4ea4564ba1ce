"""Kinds of checkpoints that people have of the model and that are not read: GGUF and MLX."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import CheckpointError

NOT_READ = {
    "GGUF": "files of llama.cpp, with numbers, names and settings of their own",
    "MLX": "4 or 8 bits in words of MLX's own order, with scales and biases",
}
"""Why each kind is not read."""


def refused(named: str | Path, kind: str) -> CheckpointError:
    """Return the error for a checkpoint of a kind that is not read. kind: of NOT_READ."""
    return CheckpointError(
        f"{named} is {kind}: {NOT_READ[kind]}. It is not read. Take a folder of safetensors, in "
        "bfloat16 or quantised as docs/options.md lists, such as "
        "cyankiwi/Qwen3-Omni-30B-A3B-Instruct-AWQ-4bit."
    )


def refuse_local_gguf(path: Path) -> None:
    """Raise CheckpointError for a GGUF file, or a folder that has them and no safetensors."""
    files = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    refuse_gguf(path, files)


def refuse_gguf(named: str | Path, files: Iterable[str]) -> None:
    """Raise CheckpointError where files are GGUF and none of them safetensors."""
    suffixes = {Path(name).suffix for name in files}
    if ".gguf" in suffixes and ".safetensors" not in suffixes:
        raise refused(named, "GGUF")


def refuse_mlx(named: str | Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a config.json whose numbers MLX has packed.

    Its settings have no method. Older files have them under "quantization" alone.
    """
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping) or "quant_method" in settings:
        return
    if {"bits", "group_size"} <= settings.keys():
        raise refused(named, "MLX")
