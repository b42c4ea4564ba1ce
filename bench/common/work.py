"""Work of one call of a decoder, counted from a checkpoint's config: nothing is measured here."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import nn

from qwen3_omni_neuron.cpu.precision import PRECISIONS, Precision, library_for, weight_form
from qwen3_omni_neuron.model.config import DecoderConfig

L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True)
class Work:
    """Bytes that one call has to read, and its multiply-adds.

    weight_bytes: each weight, counted again when needed after all others of its pass;
    distinct_bytes: each weight once. kv_bytes: keys and values of all positions, once. Only
    experts that the rows can have chosen count, and tables of rows do not count.
    """

    weight_bytes: int
    distinct_bytes: int
    kv_bytes: int
    multiply_adds: int


def work_of(
    part: str,
    module: nn.Module,
    c: DecoderConfig,
    dtype: str,
    rows: int,
    before: int = 0,
    passes: int = 1,
) -> Work:
    """Count the work of `rows` rows of one slot on the CPU, with logits of the last row only.

    part: "thinker", "talker" or "code_predictor", as in checkpoint.modules.Models; module: that
    part, which may be on the meta device; c: its decoder's config; dtype: one of
    cpu.precision.PRECISIONS; before: positions that the slot holds; passes: calls of the layers
    that the rows are spread over. The code predictor has a head for each pass.
    """
    precision = precision_of(dtype)
    weight_bytes = distinct_bytes = multiply_adds = 0
    for name, parameter in module.named_parameters():
        if "embedding" in name:
            continue
        nbytes, values = kept_bytes(precision, part, module, name), parameter.numel()
        times, runs = passes, rows
        if "head" in name:
            times = runs = 1
        elif c.moe is not None and name.endswith((".gate_up", ".down")):  # in a routed expert
            chosen = c.moe.experts_per_token
            values = values * chosen // c.moe.experts
            nbytes = nbytes * min(c.moe.experts, rows * chosen) // c.moe.experts
        weight_bytes += times * nbytes
        distinct_bytes += nbytes
        if "norm" not in name:
            multiply_adds += runs * values
    pairs = rows * before + rows * (rows + 1) // 2
    return Work(
        weight_bytes,
        distinct_bytes,
        2 * c.layers * c.kv_heads * c.head_dim * (before + rows) * precision.others.itemsize,
        multiply_adds + 2 * c.layers * c.heads * c.head_dim * pairs,
    )


def precision_of(dtype: str) -> Precision:
    """Return the types that weights are kept in here: torch's, without the C library."""
    precision = PRECISIONS[dtype]
    widened = precision.packed and library_for(dtype) is None
    return PRECISIONS["float32"] if widened else precision


def kept_bytes(precision: Precision, part: str, module: nn.Module, name: str) -> int:
    """Return the bytes of a parameter as it is kept: with padding, and with its scale in int8."""
    form = weight_form(precision, part, module, name)
    kept = form.layout(name, module.get_parameter(name).shape)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in kept.values())


def l3_bytes() -> int | None:
    """Return the size of the level-3 cache that Linux names, or None."""
    try:
        text = L3_SIZE.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text.removesuffix("K")) * 1024
