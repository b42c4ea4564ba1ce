"""Round matrices to int8; read quantised ones (checkpoint.quantised) as numbers or weights."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.quantised import WORD_BITS, QuantisedForm
from qwen3_omni_neuron.errors import CheckpointError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the 8 values with sign bit 0
_LARGEST_E4M3 = 448.0
_LARGEST_INT8 = 127
Read = Callable[[str], Tensor]
"""Reader of a stored tensor by name."""


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise CheckpointError if a number is NaN or infinite."""
    # The sum is finite only if all numbers are; it runs at memory speed, 40 GB/s.
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return
    if wrong := int(tensor.isfinite().logical_not().sum()):
        raise CheckpointError(
            f"{name} is NaN or infinite in {wrong} of {tensor.numel()} numbers. Use another "
            "checkpoint or adapter, or an earlier state of its training."
        )


def read_weights(form: QuantisedForm, read: Read) -> Tensor:
    """Read a quantised matrix as weights, float32 [out, into]. Raises CheckpointError."""
    if form.label == "NVFP4":
        return _of_nvfp4(form, read)
    if "FP8" in form.label:
        return _of_fp8(form, read)
    numbers, scale = read_numbers(form, read)
    each = scale.float().repeat_interleave(form.block[1], 1)
    return numbers.float().mul_(each[:, : form.shape[1]])


def read_numbers(form: QuantisedForm, read: Read) -> tuple[Tensor, Tensor]:
    """Read a GPTQ or pack-quantized matrix. Raises CheckpointError.

    Returns numbers, int8 [out, into], around 0, and scales [out, groups].
    """
    middle = 1 << (form.bits - 1)
    if form.label == "pack-quantized":
        numbers = _unpacked(read(f"{form.layer}.weight_packed"), form.bits).flatten(1)
        return (numbers - middle).to(torch.int8), read(f"{form.layer}.weight_scale")
    # Stored zero points are 1 less.
    if (_unpacked(read(f"{form.layer}.qzeros"), form.bits) != middle - 1).any():
        raise _contradiction(f"{form.layer}.qzeros has zero points off the middle", "sym false")
    if "g_idx" in form.endings:
        groups = torch.arange(form.shape[1]) // form.block[1]
        if not torch.equal(read(f"{form.layer}.g_idx").long(), groups):
            raise _contradiction(f"{form.layer}.g_idx has groups in another order", "desc_act")
    # [into / 8, out] -> [into / 8, out, 8] -> [into, out]
    numbers = _unpacked(read(f"{form.layer}.qweight"), form.bits).transpose(1, 2).flatten(0, 1)
    return (numbers - middle).to(torch.int8).t(), read(f"{form.layer}.scales").t()


def _contradiction(what: str, setting: str) -> CheckpointError:
    return CheckpointError(
        f"{what}: GPTQ with {setting} is not supported. Use another checkpoint: docs/options.md."
    )


def _of_fp8(form: QuantisedForm, read: Read) -> Tensor:
    (out, into), (rows, inputs) = form.shape, form.block
    ending = "weight_scale_inv" if "weight_scale_inv" in form.endings else "weight_scale"
    scale = read(f"{form.layer}.{ending}").float().reshape(-(-out // rows), -(-into // inputs))
    each = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(inputs, 1)[:, :into]
    return read(f"{form.layer}.weight").float().mul_(each)


def _of_nvfp4(form: QuantisedForm, read: Read) -> Tensor:
    # NaN stands for the largest scale: modelopt 0.44 cast larger ones to it.
    scale = read(f"{form.layer}.weight_scale").float().nan_to_num_(nan=_LARGEST_E4M3)
    if "weight_global_scale" in form.endings:
        scale /= read(f"{form.layer}.weight_global_scale")
        packed = read(f"{form.layer}.weight_packed")
    else:
        scale *= read(f"{form.layer}.weight_scale_2")
        packed = read(f"{form.layer}.weight")
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    both = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # low bits first
    # [out, into / 2] -> [out, into / 2, 2] -> [out, into]
    wide = both[packed.int()].flatten(1)
    wide.mul_(scale.repeat_interleave(form.block[1], 1)[:, : form.shape[1]])
    if "pre_quant_scale" in form.endings:  # factor of the inputs; here applied to weights
        wide.mul_(read(f"{form.layer}.pre_quant_scale").float())
    return wide


def _unpacked(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [..., out, into] to int8. Returns it and its scale, float32 [..., out].

    Each row's largest weight becomes 127. Stacks are rounded one matrix at a time.
    """
    rounded = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scale = torch.empty(matrix.shape[:-1], dtype=torch.float32, device=matrix.device)
    stack = matrix.flatten(0, -3) if matrix.ndim > 2 else matrix.unsqueeze(0)
    flat = rounded.view(stack.shape), scale.view(stack.shape[:-1])
    # A GPU multiplies by the reciprocal, which rounds differently.
    largest = torch.tensor(_LARGEST_INT8, device=matrix.device)
    for one, to, by in zip(stack, *flat, strict=True):
        wide = one.float()
        by.copy_(wide.abs().amax(-1) / largest)
        # The clamp keeps a row of zeros at zero.
        to.copy_(wide.div(by.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_())
    return rounded, scale
