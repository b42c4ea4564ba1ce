"""Writers of quantised matrices and of checkpoints that have them, by the formulas as published.

A writer takes a matrix [out, into] and returns the tensors that stand for it, by ending, and the
weights that they stand for, computed in float32 as scale * (number - zero point).
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]


def write_quantised_checkpoint(
    folder: Path,
    to: Path,
    writer_of: Callable[[str], Writer | None],
    settings: Mapping[str, Any] | None,
) -> tuple[Path, Path]:
    """Write a checkpoint with some of its matrices quantised, and one with their weights.

    writer_of: writer by released name, None for a tensor that stays as it is. settings: the
    quantization_config or None. Returns both folders; in the second, `dtype` is float32.
    """
    quantised, widened = to / "quantised", to / "widened"
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            writer = writer_of(name)
            if writer is None:
                stored[name], weights[name] = tensor, tensor.float()
                continue
            tensors, weights[name] = writer(tensor.float())
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{ending}": part for ending, part in tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    for made, tensors, changes in (
        (quantised, stored, {"quantization_config": settings}),
        (widened, weights, {"dtype": "float32"}),
    ):
        shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({n: t.contiguous() for n, t in tensors.items()}, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(config | changes))
    return quantised, widened


def packed_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack unsigned numbers [..., n], lowest bits first, into int32 [..., n bits / 32]."""
    per_word = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], -(-numbers.shape[-1] // per_word), dtype=torch.int64)
    for place in range(numbers.shape[-1]):
        words[..., place // per_word] |= numbers[..., place].long() << place % per_word * bits
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Grouped:
    """Unsigned numbers of a matrix in groups of inputs with a scale of either sign."""

    def __init__(self, weight: Tensor, bits: int, size: int, scale: torch.dtype):
        middle = 1 << (bits - 1)
        into = weight.shape[1]  # the last group may be smaller
        parts = F.pad(weight, (0, -into % size)).unflatten(1, (-1, size))
        largest = parts.gather(2, parts.abs().argmax(2, keepdim=True))[..., 0]
        # No power of two of a weight: groups with such scales survive another rounding.
        self.scales = (largest / -middle * 1.04).to(scale)
        self.zeros = torch.full(self.scales.shape, middle)
        each = self.scales.float().repeat_interleave(size, 1)[:, :into]
        self.numbers = (weight / each).round().add(middle).clamp(0, 2 * middle - 1).long()
        self.weights = each * (self.numbers - middle).float()


def gptq(size: int = 32, indexed: bool = False) -> Writer:
    """Return a writer of GPTQ, and of auto-round's files, of 4 bits. indexed: with g_idx."""

    def write(weight: Tensor) -> Written:
        made = Grouped(weight, 4, size, torch.float16)
        tensors = {
            "qweight": packed_words(made.numbers, 4).t(),
            "qzeros": packed_words(made.zeros.t() - 1, 4),
            "scales": made.scales.t(),
        }
        if indexed:
            tensors["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // size
        return tensors, made.weights

    return write


def pack_quantized(bits: int = 4, size: int = 32) -> Writer:
    """Return a writer of compressed-tensors' pack-quantized."""

    def write(weight: Tensor) -> Written:
        made = Grouped(weight, bits, size, torch.bfloat16)
        tensors = {
            "weight_packed": packed_words(made.numbers, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, made.weights

    return write


def int8_exact(weight: Tensor) -> Written:
    """Write weights, in bfloat16, that rounding to int8 does not change."""
    scale = torch.exp2((weight.abs().amax(1, keepdim=True) / 127).log2().ceil())
    numbers = (weight / scale).round()
    largest = weight.abs().argmax(1, keepdim=True)
    numbers.scatter_(1, largest, weight.gather(1, largest).sign() * 127)
    wide = numbers * scale
    return {"weight": wide.bfloat16()}, wide


def fp8(static: bool = False, rows: bool = False) -> Writer:
    """Return a writer of FP8 with a scale of the whole matrix, or of each row."""

    def write(weight: Tensor) -> Written:
        scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": numbers, "weight_scale": scale}
        if static:
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, numbers.float() * scale

    return write


def block_fp8(size: int = 128) -> Writer:
    """Return a writer of FP8 with scales of blocks."""

    def write(weight: Tensor) -> Written:
        numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        wide = torch.empty_like(weight)
        tops, lefts = (range(0, length, size) for length in weight.shape)
        scale = torch.empty(len(tops), len(lefts))
        for row, top in enumerate(tops):
            for column, left in enumerate(lefts):
                at = slice(top, top + size), slice(left, left + size)
                factor = weight[at].abs().max() / 448
                scale[row, column] = factor
                numbers[at] = (weight[at] / factor).to(torch.float8_e4m3fn)
                wide[at] = numbers[at].float() * factor
        return {"weight": numbers, "weight_scale_inv": scale}, wide

    return write


def nvfp4(modelopt: bool = False, rounded_inputs: bool = True, smoothed: bool = False) -> Writer:
    """Return a writer of NVFP4 as compressed-tensors, or modelopt, stores it.

    rounded_inputs: with a scale of activations. smoothed: modelopt's, with a factor of each input.
    """
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def write(weight: Tensor) -> Written:
        factors = 1 + torch.arange(weight.shape[1]) % 5 / 4 if smoothed else torch.ones(1)
        groups = (weight / factors).unflatten(1, (-1, 16))
        whole = 448 * 6 / groups.abs().max()
        if modelopt:
            whole = 1 / whole
        largest = groups.abs().amax(2)
        scale = (largest / 6 / whole if modelopt else largest / 6 * whole).to(torch.float8_e4m3fn)
        each = scale.float() * whole if modelopt else scale.float() / whole
        each = each.unsqueeze(2)
        nearest = (groups.abs() / each).unsqueeze(3).sub(values).abs().argmin(3)
        wide = (values[nearest] * groups.sign() * each).flatten(1) * factors
        numbers = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        packed = numbers[:, 0::2] + 16 * numbers[:, 1::2]
        names = ("weight", "weight_scale_2", "input_scale")
        if not modelopt:
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            whole = whole.reshape(1)
        tensors = dict(zip(names, (packed, whole, torch.full_like(whole, 0.5)), strict=True))
        if not rounded_inputs:
            del tensors[names[2]]
        if smoothed:
            tensors["pre_quant_scale"] = factors
        return {**tensors, "weight_scale": scale}, wide

    return write
