"""The thinker's experts in int8, and the weights that they stand for."""

import re
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models, fill
from qwen3_omni_neuron.checkpoint.rounding import quantise
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.neuron.graphs.all import static_models
from testing.graph_cases import with_weights
from testing.quantised_checkpoint import Writer, Written, write_quantised_checkpoint

EXPERT = re.compile(r"thinker\.model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")
SETTINGS = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def rounded(weight: Tensor) -> Written:
    """Round a matrix as a compile does; a writer of testing.quantised_checkpoint."""
    numbers, scale = quantise(weight)
    by_row = scale.unsqueeze(-1)
    return {"weight": numbers, "weight_scale": by_row}, numbers.float() * by_row


def write_int8_experts(folder: Path, to: Path, writer: Writer = rounded) -> tuple[Path, Path]:
    """Write a checkpoint with the thinker's experts quantised, and one with their weights."""
    return write_quantised_checkpoint(
        folder, to, lambda name: writer if EXPERT.fullmatch(name) else None, SETTINGS
    )


def int8_models(config: OmniConfig, weights: Models, dtype: torch.dtype) -> Models:
    """Make static models with the thinker's experts in int8, rounded from loaded ones."""
    models = with_weights(static_models(config, dtype, int8=True), weights)
    assert weights.thinker is not None and models.thinker is not None
    for name, weight in weights.thinker.named_parameters():
        if name.endswith(("ffn.gate_up", "ffn.down")):
            numbers, scale = quantise(weight)
            fill(models.thinker, [(name, numbers), (name + SCALE, scale)])
    return models
