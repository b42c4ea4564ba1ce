"""A checkpoint with the weights that a rounding dtype computes with, for the reference to read."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from qwen3_omni_neuron.verification.write import rounded_weight


def write_rounded_checkpoint(folder: Path, to: Path, predictor_dtype: str) -> Path:
    """Copy a checkpoint, in float32 and with the rounding of dtype int4. Returns the new folder.

    predictor_dtype: "same" or, where the code predictor's weights are those stored, "mixed".
    """
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        stored = load_file(file)
        tensors = {name: rounded_weight(name, tensor, "int4") for name, tensor in stored.items()}
        if predictor_dtype == "mixed":
            exact = [name for name in stored if name.startswith("talker.code_predictor.")]
            tensors |= {name: stored[name].float() for name in exact}
        save_file(tensors, file, {"format": "pt"})
    return to
