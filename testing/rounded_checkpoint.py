"""A checkpoint with the weights that a rounding dtype computes with, for the reference to read."""

import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen3_omni_neuron.checkpoint.rounding import quantise
from qwen3_omni_neuron.cpu.packing import Groups, quantise_groups

# By released names. The rows of a matrix, and the groups of a row, are rounded alone: it doesn't
# matter which of them are one matrix in our modules.
LAYER = (
    r"model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.\w+_proj\.weight"
)
INT4 = re.compile(rf"thinker\.{LAYER}")
INT8 = re.compile(
    r"thinker\.lm_head\.weight|talker\.codec_head\.weight"
    rf"|talker\.(code_predictor\.)?{LAYER}|talker\.code_predictor\.lm_head\.\d+\.weight"
)
EXACT = re.compile(r"talker\.code_predictor\.model\.layers\.\d+\.mlp\.down_proj\.weight")


def write_rounded_checkpoint(folder: Path, to: Path) -> Path:
    """Copy a checkpoint, in float32 and with the rounding of dtype int4. Returns the new folder."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for file in to.glob("*.safetensors"):
        tensors = {name: _rounded(name, tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return to


def _rounded(name: str, weight: Tensor) -> Tensor:
    if INT4.fullmatch(name):
        groups = Groups()
        numbers, scale = quantise_groups(weight, groups)
        wide = scale.float().repeat_interleave(groups.size, -1)[:, : weight.shape[1]]
        return numbers.float() * wide
    if INT8.fullmatch(name) and not EXACT.fullmatch(name):
        whole, row_scale = quantise(weight)
        return whole.float() * row_scale.unsqueeze(-1)
    return weight.float()
