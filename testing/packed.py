"""Modules with weights as the CPU keeps them, and the same weights widened, for comparisons."""

import copy
from typing import TypeVar

import torch
from torch import nn

from qwen3_omni_neuron.cpu.precision import PRECISIONS, weight_form
from qwen3_omni_neuron.cpu.weights import put_kept, put_widened

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def randomize(module: nn.Module, seed: int = 0, embedded: float = 1.0) -> None:
    """Draw weights that keep the rows' size; norms around 1; embedded: size of tables' rows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        weight.normal_(generator=generator)
        if "norm" in name or "magnitude" in name or "frequency" in name:
            weight.mul_(0.1).add_(1)
        elif "embedding" in name:
            weight.mul_(embedded)
        elif name.endswith("down") and weight.ndim == 3:  # [experts, out, in]
            weight.mul_(weight.shape[2] ** -0.5)
        elif weight.ndim > 1:
            weight.mul_((weight.numel() / len(weight)) ** -0.5)


@torch.no_grad()
def packed_and_widened(module: Module, part: str, dtype: str) -> tuple[Module, Module]:
    """Return a module for the C, and one for torch with the values that the C computes with.

    part: the module's name in checkpoint.modules.Models; dtype: one of cpu.precision.PRECISIONS.
    The module itself is not changed.
    """
    packed, widened = copy.deepcopy(module), copy.deepcopy(module)
    for target, parameter in module.named_parameters():
        form = weight_form(PRECISIONS[dtype], part, module, target)
        kept = form.keep(target, parameter.detach().to(form.dtype))
        put_kept(packed, target, form, kept)
        put_widened(widened, target, form, kept)
    return packed, widened
