"""The reference with the weights of the CPU's dtypes. `mixed`: bfloat16 matrices and tables."""

import re
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.cpu.packing import Groups, quantise_groups

ROUNDED = ("mixed", "int8", "int4")
# By names in transformers 4.57 and 5, or in a checkpoint. Rows are rounded alone: which rows form
# one matrix doesn't matter.
_LAYER = (
    r"model\.(?:language_model\.)?layers\.\d+\."
    r"(?:self_attn|mlp|mlp\.experts(?:\.\d+)?|mlp\.shared_expert)\.\w+_proj(?:\.weight)?"
)
_THINKER = re.compile(rf"thinker\.{_LAYER}")
_OTHERS = re.compile(
    r"thinker\.lm_head\.weight|talker\.codec_head\.weight"
    rf"|talker\.(?:code_predictor\.)?{_LAYER}|talker\.code_predictor\.lm_head\.\d+\.weight"
)
# The audio encoder's convolutions and the vision encoder's positions are not matrices.
_ENCODERS = re.compile(
    r"thinker\.(?:model\.)?(?:audio_tower|visual)\.(?!conv2d|pos_embed)[\w.]+\.weight"
)
_EXACT = re.compile(r"talker\.code_predictor\.model\.layers\.\d+\.mlp\.down_proj\.weight")


def rounded_weight(name: str, weight: Tensor, dtype: str) -> Tensor:
    """Return a parameter in float32 with the rounding of a dtype."""
    weight = weight.bfloat16().float() if weight.ndim > 1 else weight.float()
    if dtype == "mixed" or not _is_rounded(name, weight):
        return weight
    if dtype == "int4" and _THINKER.fullmatch(name):
        groups = Groups()
        numbers, scale = quantise_groups(weight.bfloat16(), groups)
        wide = scale.float().repeat_interleave(groups.size, -1)[..., : weight.shape[-1]]
        return numbers.float() * wide
    # The vision encoder's first weight is stored as a convolution, [out, channels, ...].
    rows = weight.flatten(1) if _ENCODERS.fullmatch(name) else weight
    whole, row_scale = quantise(rows)
    return (whole.float() * row_scale.unsqueeze(-1)).view(weight.shape)


@torch.no_grad()
def round_weights(model: Any, dtype: str) -> None:
    """Round the weights of a model of transformers, in place, one matrix of a stack at a time."""
    for name, parameter in model.named_parameters():
        is_stack = parameter.ndim > 2 and not _ENCODERS.fullmatch(name)
        for matrix in parameter if is_stack else (parameter,):
            matrix.copy_(rounded_weight(name, matrix, dtype))


def _is_rounded(name: str, weight: Tensor) -> bool:
    if _ENCODERS.fullmatch(name):
        return weight.ndim > 1  # norms have a dimension
    large = _THINKER.fullmatch(name) or _OTHERS.fullmatch(name)
    return bool(large) and not _EXACT.fullmatch(name)
