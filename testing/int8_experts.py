"""The thinker's experts in int8, and the weights that they stand for."""

import re
from pathlib import Path

import torch

from qwen3_omni_neuron.checkpoint.modules import Models, fill
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.neuron.graphs.all import static_models
from testing.graph_cases import with_weights
from testing.quantised_checkpoint import int8_exact, write_quantised_checkpoint

EXPERT = re.compile(r"thinker\.model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight")


def write_int8_experts(folder: Path, to: Path) -> tuple[Path, Path]:
    """Write a checkpoint whose experts rounding to int8 does not change, and one in float32."""
    return write_quantised_checkpoint(
        folder, to, lambda name: int8_exact if EXPERT.fullmatch(name) else None, None
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
