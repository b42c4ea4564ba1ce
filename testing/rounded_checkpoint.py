"""A checkpoint with the weights that a rounding dtype computes with, for the reference to read."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from qwen3_omni_neuron.verification.rounding import rounded_weight


def write_rounded_checkpoint(folder: Path, to: Path) -> Path:
    """Copy a checkpoint, in float32 and with the rounding of dtype int4. Returns the new folder."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        stored = load_file(file).items()
        tensors = {name: rounded_weight(name, tensor, "int4") for name, tensor in stored}
        save_file(tensors, file, {"format": "pt"})
    return to
