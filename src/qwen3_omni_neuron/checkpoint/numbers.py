"""Read quantised matrices: their published numbers, or the weights that they stand for.

checkpoint.quantised tells their forms. A weight is computed in float32 by the formula there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.quantised import WORD_BITS, QuantisedForm
from qwen3_omni_neuron.errors import CheckpointError

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each number of a word, lowest bits first
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the 8 numbers whose sign bit is 0
_LARGEST_E4M3 = 448.0
Read = Callable[[str], Tensor]
"""Function that reads a stored tensor by name."""


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of integers: a weight is scale * (number - zero point).

    numbers: int8 [out, into], the middle of their range is 0. scale: float16, bfloat16 or float32
    [out, groups]. zero_points: int16 [out, groups], None where all are 0. group_of: group of each
    input, int64 [into], None where size inputs after each other are a group. size: inputs of a
    group.
    """

    numbers: Tensor
    scale: Tensor
    zero_points: Tensor | None
    group_of: Tensor | None
    size: int

    def weights(self) -> Tensor:
        """Return the weights, float32 [out, into]."""
        into = self.numbers.shape[1]
        group_of = torch.arange(into) // self.size if self.group_of is None else self.group_of
        wide = self.numbers.float()
        if self.zero_points is not None:
            wide -= self.zero_points.float()[:, group_of]
        return wide.mul_(self.scale.float()[:, group_of])


def read_weights(form: QuantisedForm, read: Read) -> Tensor:
    """Read a quantised matrix. Returns its weights, float32 [out, into].

    Raises CheckpointError where its tensors contradict its form.
    """
    if not form.floating and form.block[0] in (1, form.shape[0]):
        return read_numbers(form, read).weights()
    if form.bits == 4:
        return _of_fp4(form, read)
    (out, into), (rows, inputs) = form.shape, form.block
    ending = "weight_scale_inv" if "weight_scale_inv" in form.endings else "weight_scale"
    scale = read(f"{form.layer}.{ending}").float().reshape(-(-out // rows), -(-into // inputs))
    each = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(inputs, 1)[:, :into]
    wide = read(f"{form.layer}.weight").float()
    # In spite of the name most files have multipliers there, about max|w| / 448; some really have
    # reciprocals, which are as far above 1 as those are below it.
    if ending == "weight_scale_inv" and scale.median() > 1:
        return wide.div_(each)
    return wide.mul_(each)


def read_numbers(form: QuantisedForm, read: Read) -> IntegerMatrix:
    """Read the numbers of a matrix of integers whose scales belong to whole rows or parts of them.

    Raises CheckpointError where its tensors contradict its form.
    """
    if "qweight" in form.endings:
        return _of_columns(form, read)
    if "weight_packed" in form.endings:
        return _of_rows(form, read)
    (out, into), size = form.shape, form.block[1]
    groups = -(-into // size)
    scale = read(f"{form.layer}.weight_scale").reshape(-1, groups).expand(out, groups)
    zeros = None
    if form.zero_points:
        stored = read(f"{form.layer}.weight_zero_point").to(torch.int16)
        zeros = stored.reshape(-1, groups).expand(out, groups)
    return IntegerMatrix(read(f"{form.layer}.weight"), scale, zeros, None, size)


def _of_fp4(form: QuantisedForm, read: Read) -> Tensor:
    """Read the weights of a matrix of NVFP4.

    A scale that is not a number is the largest: modelopt 0.44 cast larger ones to it.
    """
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
    if "pre_quant_scale" in form.endings:  # inputs are multiplied by it: here their weights are
        wide.mul_(read(f"{form.layer}.pre_quant_scale").float())
    return wide


def _of_columns(form: QuantisedForm, read: Read) -> IntegerMatrix:
    """Read a matrix of GPTQ or AWQ."""
    words, packed_zeros = read(f"{form.layer}.qweight"), read(f"{form.layer}.qzeros")
    scale = read(f"{form.layer}.scales").t()
    if form.label == "AWQ":
        places = torch.tensor(_AWQ_OUTPUTS).argsort()
        stored = _unpacked(words, form.bits)[..., places].flatten(1)  # [into, out]
        zeros = _unpacked(packed_zeros, form.bits)[..., places].flatten(1)
    else:
        # [into / 8, out] -> [into / 8, out, 8] -> [into, out]
        stored = _unpacked(words, form.bits).transpose(1, 2).flatten(0, 1)
        zeros = _unpacked(packed_zeros, form.bits).flatten(1)
    centred = _centred(zeros, form.bits).t() + form.one_less
    if not form.zero_points and centred.any():
        raise CheckpointError(
            f"{form.layer}.qzeros has other zero points than the middle of {form.bits} bits, and "
            "quantization_config says sym. They belong to different checkpoints: download both "
            "again."
        )
    return IntegerMatrix(
        _centred(stored, form.bits).to(torch.int8).t(),
        scale,
        centred if form.zero_points else None,
        _group_of(form, "g_idx", read),
        form.block[1],
    )


def _of_rows(form: QuantisedForm, read: Read) -> IntegerMatrix:
    """Read a matrix of pack-quantized."""
    out, into = form.shape
    stored = _unpacked(read(f"{form.layer}.weight_packed"), form.bits).flatten(1)[:, :into]
    zeros = None
    if form.zero_points:
        # [out / 8, groups] -> [out / 8, groups, 8] -> [out, groups]
        words = _unpacked(read(f"{form.layer}.weight_zero_point"), form.bits)
        zeros = _centred(words.transpose(1, 2).flatten(0, 1)[:out], form.bits)
    return IntegerMatrix(
        _centred(stored, form.bits).to(torch.int8),
        read(f"{form.layer}.weight_scale"),
        zeros,
        _group_of(form, "weight_g_idx", read),
        form.block[1],
    )


def _group_of(form: QuantisedForm, ending: str, read: Read) -> Tensor | None:
    """Read the group of each input; None where inputs after each other are a group."""
    if ending not in form.endings:
        return None
    group_of = read(f"{form.layer}.{ending}").long()
    groups = -(-form.shape[1] // form.block[1])
    if group_of.min() < 0 or group_of.max() >= groups:
        raise CheckpointError(
            f"{form.layer}.{ending} names groups {group_of.min()} to {group_of.max()}, and there "
            f"are {groups}. Download its file again."
        )
    if form.ordered:
        return group_of
    if not torch.equal(group_of, torch.arange(form.shape[1]) // form.block[1]):
        raise CheckpointError(
            f"{form.layer}.{ending} has groups in another order than their inputs, and "
            "quantization_config says desc_act false. They belong to different checkpoints: "
            "download both again."
        )
    return None


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers of words [..., n], lowest bits first, [..., n, 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _centred(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers less the middle of their range, int16."""
    return (numbers - (1 << (bits - 1))).to(torch.int16)
