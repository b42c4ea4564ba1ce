"""Inputs of int8 and int4 matrices, rounded in torch as in the C (product.h).

Each 32 inputs of a row share a scale: the largest becomes LIMITS' integer, or its negative, and the
others the nearest integers. The C sums a group's products in integers; here they are floats.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.layers import linear
from qwen3_omni_neuron.model.moe import MoeFeedForward

INPUTS = 32
LIMITS = {"int8": 4095, "int4": 127, "published": 127}
"""Largest integer of a group of inputs, by kind of WeightForm."""
_SMALLEST = 2.0**-100  # groups without a larger input become zeros


def round_inputs(x: Tensor, limit: int) -> Tensor:
    """Round the rows of x [..., into] in groups of INPUTS."""
    into, largest_integer = x.shape[-1], torch.tensor(float(limit))
    groups = F.pad(x, (0, -into % INPUTS)).unflatten(-1, (-1, INPUTS))
    largest = groups.abs().amax(-1, keepdim=True)
    zero = largest <= _SMALLEST
    # Dividing by a number would multiply by its reciprocal, unlike the C.
    scale = torch.where(zero, 0.0, largest / largest_integer)
    numbers = (groups * torch.where(zero, 0.0, largest_integer / largest)).round_()
    return (numbers * scale).flatten(-2)[..., :into]


def round_inputs_of(module: nn.Module, target: str, kind: str) -> None:
    """Let a module round the inputs of its parameter `target` of this kind."""
    if kind not in LIMITS:
        return
    owner_name, _, name = target.rpartition(".")
    owner, rounded = module.get_submodule(owner_name), partial(round_inputs, limit=LIMITS[kind])
    if isinstance(owner, MoeFeedForward):
        owner.round_inputs[name] = rounded
    elif isinstance(owner, CodePredictor):
        owner.project = lambda x, head: linear(rounded(x), head)
    else:
        owner.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
