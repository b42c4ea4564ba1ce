"""The published form of each quantised matrix, determined by the checkpoint's files.

Qwen3-Omni's published forms are supported (docs/options.md). A matrix's tensors are named by its
layer and an ending:

    form              endings                                          value
    GPTQ (*)          qweight qzeros scales, perhaps g_idx             scale * (q - 8)
    pack-quantized    weight_packed weight_scale weight_shape          scale * (q - middle)
    FP8               weight weight_scale, of the whole matrix         scale * q
    block FP8         weight weight_scale_inv                          scale * q
    NVFP4             weight_packed weight_scale weight_global_scale   scale / global * q
    NVFP4, modelopt   weight weight_scale weight_scale_2, perhaps      scale * global * q,
                      pre_quant_scale of the inputs                    times that of its input

(*) 4 bits, all zero points in the middle, a group's inputs side by side: GPTQ's file version 1, and
auto-round's packing "auto_round:auto_gptq".

A matrix's form follows from its own tensors: most files quantise only some matrices. Scales of
activations and KV caches are ignored: neither is rounded. This module reads headers and
weight_shape; checkpoint.numbers reads values.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.headers import StoredTensor, read_integers
from qwen3_omni_neuron.errors import CheckpointError

WEIGHT = ".weight"
WORD_BITS = 32
Settings = Mapping[str, Any]
"""A quantization_config of a supported method."""
_OF_INPUTS = ("input_scale", "input_global_scale")
_OF_ACTIVATIONS = (*_OF_INPUTS, "output_scale", "k_scale", "v_scale")
_NOT_OF_WEIGHTS = ("input_activations", "output_activations", "kv_cache_scheme")
_PLAIN = ("BF16", "F16", "F32", "F64")
_FP4_GROUP = 16
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "auto-round": {"packing_format": "auto_round:auto_gptq", "sym": True, "bits": 4},
    "compressed-tensors": {},
    "fp8": {},
    "gptq": {"checkpoint_format": "gptq", "sym": True, "desc_act": False, "bits": 4},
    "modelopt": {},
}
"""Supported methods, and required values of settings that are set."""


@dataclass(frozen=True)
class QuantisedForm:
    """The form of one quantised matrix [out, into].

    layer: name without an ending. endings: of the names of its tensors. label: name of the form in
    messages. bits: size of a number. block: rows and inputs that share a scale. scale: its
    safetensors type. bytes: size of all tensors.
    """

    layer: str
    endings: frozenset[str]
    label: str
    shape: tuple[int, int]
    bits: int
    block: tuple[int, int]
    scale: str
    bytes: int

    @property
    def are_groups_of_int4(self) -> bool:
        """True for 4-bit integers with a scale per multiple of 32 inputs."""
        return (
            self.label in ("GPTQ", "pack-quantized") and self.bits == 4 and not self.block[1] % 32
        )


def read_settings(folder: Path) -> Settings | None:
    """Read a checkpoint's quantisation settings, None without.

    In config.json, quantization_config.json or hf_quant_config.json. Raises CheckpointError for an
    unsupported method or setting.
    """
    found = find_settings(folder)
    if found is None:
        return None
    _, raw = found
    producer = raw.get("producer") or {}
    method = str(raw.get("quant_method") or producer.get("name")).removeprefix("intel/")
    wrong = [f"the method {method!r}"] if method not in _METHODS else []
    wrong += [
        f"{method} with {name} {raw[name]!r}"
        for name, value in _METHODS.get(method, {}).items()
        if raw.get(name, value) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} is quantised by {wrong[0]}, which is not supported; docs/options.md lists "
            f"the forms of {', '.join(_METHODS)} that are. Use one of them, or bfloat16."
        )
    return raw


def find_settings(folder: Path) -> tuple[str, Settings] | None:
    """Return a checkpoint's quantisation settings and their file. Raises CheckpointError."""
    for name in ("config.json", "quantization_config.json", "hf_quant_config.json"):
        try:
            found = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder / name} can't be read: {error}. Download it again."
            ) from error
        if name == "config.json" and isinstance(found, Mapping):
            found = found.get("quantization_config")
        if isinstance(found, Mapping):
            return name, found
    return None


def scales_of_inputs(names: Iterable[str]) -> int:
    """Count the matrices with a scale for inputs."""
    return sum(name.rpartition(".")[2] in _OF_INPUTS for name in names)


def quantised_forms(
    tensors: Mapping[str, StoredTensor], settings: Settings | None
) -> tuple[dict[str, QuantisedForm], set[str]]:
    """Return forms by the matrix's released name, which ends in ".weight".

    Also returns the names of all their and activations' tensors. Raises CheckpointError for an
    unsupported form, with its first matrix.
    """
    layers: dict[str, set[str]] = {}
    used = {n for n in tensors if n.rpartition(".")[2] in _OF_ACTIVATIONS}
    for name in tensors.keys() - used:
        layer, _, ending = name.rpartition(".")
        if ending in _ENDINGS:
            layers.setdefault(layer, set()).add(ending)
    forms: dict[str, QuantisedForm] = {}
    for layer, endings in sorted(layers.items()):
        if layer + WEIGHT in tensors:
            endings.add("weight")
        parts = {ending: tensors[f"{layer}.{ending}"] for ending in endings}
        forms[layer + WEIGHT] = _form(_Matrix(layer, parts), settings or {})
        used |= {f"{layer}.{ending}" for ending in endings}
    for name, stored in tensors.items():
        if name not in used and stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{name} is of type {stored.dtype}, without a scale. A file is missing, "
                "or the form is not supported: use another checkpoint."
            )
    return forms, used


@dataclass(frozen=True)
class _Matrix:
    layer: str
    tensors: Mapping[str, StoredTensor]

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.layer} has {', '.join(sorted(self.tensors))}: {what}. Use a checkpoint in "
            "another form, or the one in bfloat16."
        )

    def rows_and_columns(self, ending: str) -> tuple[int, int]:
        shape = self.tensors[ending].shape
        if len(shape) != 2:
            raise self.refused(f"{ending} has shape {list(shape)} instead of two axes")
        return shape[0], shape[1]

    def check(self, ending: str, types: str, *shape: int) -> None:
        stored = self.tensors[ending]
        if stored.dtype not in types.split() or stored.shape != shape:
            raise self.refused(
                f"{ending} is of type {stored.dtype} and shape {list(stored.shape)}; expected "
                f"{types.replace(' ', ' or ')} of {list(shape)}"
            )

    def form(
        self, label: str, shape: tuple[int, int], bits: int, block: tuple[int, int], scale: str
    ) -> QuantisedForm:
        size = sum(stored.bytes for stored in self.tensors.values())
        endings, scale_type = frozenset(self.tensors), self.tensors[scale].dtype
        return QuantisedForm(self.layer, endings, label, shape, bits, block, scale_type, size)


_FLOATS = "F16 BF16 F32"


def _form(m: _Matrix, settings: Settings) -> QuantisedForm:
    for telling, (read, must, may) in _LAYOUTS.items():
        if telling in m.tensors:
            if lacking := must - m.tensors.keys():
                raise m.refused(f"{', '.join(sorted(lacking))} is missing")
            if unknown := m.tensors.keys() - must - may:
                raise m.refused(f"{', '.join(sorted(unknown))} is not supported")
            return read(m, settings)
    raise m.refused("its numbers are missing, or its form is not supported")


def _gptq(m: _Matrix, settings: Settings) -> QuantisedForm:
    groups, out = m.rows_and_columns("scales")
    into = m.rows_and_columns("qweight")[0] * WORD_BITS // 4
    m.check("scales", _FLOATS, groups, out)
    m.check("qweight", "I32", into * 4 // WORD_BITS, out)
    m.check("qzeros", "I32", groups, out * 4 // WORD_BITS)
    if "g_idx" in m.tensors:
        m.check("g_idx", "I32 I64", into)
    return m.form("GPTQ", (out, into), 4, (1, _group_size(m, into, groups, settings)), "scales")


def _pack_quantized(m: _Matrix, settings: Settings) -> QuantisedForm:
    m.check("weight_shape", "I32 I64", 2)
    out, into = read_integers(m.tensors["weight_shape"])
    bits = m.rows_and_columns("weight_packed")[1] * WORD_BITS // max(into, 1)
    if bits not in (4, 8):
        raise m.refused(f"its numbers have {bits} bits; 4 and 8 are supported")
    m.check("weight_packed", "I32", out, into * bits // WORD_BITS)
    groups = m.rows_and_columns("weight_scale")[1]
    m.check("weight_scale", _FLOATS, out, groups)
    size = _group_size(m, into, groups, settings)
    return m.form("pack-quantized", (out, into), bits, (1, size), "weight_scale")


def _group_size(m: _Matrix, into: int, groups: int, settings: Settings) -> int:
    """Return the group size that settings and shapes agree on.

    The last group may be smaller: 96 inputs make two groups of 64.
    """
    named = sorted(set(_named_sizes(settings)))
    fitting = {min(size or into, into) for size in named if -(-into // (size or into)) == groups}
    if len(fitting) != 1:
        sizes = ", ".join(str(size or "all inputs") for size in named) or "nothing"
        which = "more than one fits" if fitting else "none fits"
        raise m.refused(
            f"{into} inputs are in {groups} groups, and the settings have group_size {sizes}: "
            f"{which}"
        )
    return fitting.pop()


def _named_sizes(settings: Settings) -> Iterator[int]:
    """Yield weights' group sizes in the settings; 0 means all inputs."""
    for name, value in settings.items():
        if name == "group_size":
            yield max(value or 0, 0)
        elif isinstance(value, Mapping) and name not in _NOT_OF_WEIGHTS:
            yield from _named_sizes(value)


def _fp8(m: _Matrix, settings: Settings) -> QuantisedForm:
    shape = m.rows_and_columns("weight")
    m.check("weight", "F8_E4M3", *shape)
    if "weight_scale" in m.tensors:
        whole = m.tensors["weight_scale"].shape
        if prod(whole) != 1:
            raise m.refused(f"weight_scale has shape {list(whole)} instead of one number")
        m.check("weight_scale", _FLOATS, *whole)
        return m.form("FP8", shape, 8, shape, "weight_scale")
    rows, inputs = settings.get("weight_block_size") or (128, 128)
    blocks = -(-shape[0] // rows), -(-shape[1] // inputs)
    m.check("weight_scale_inv", _FLOATS, *blocks)
    if blocks == (1, 1):
        return m.form("FP8", shape, 8, shape, "weight_scale_inv")
    return m.form("block FP8", shape, 8, (rows, inputs), "weight_scale_inv")


def _nvfp4(m: _Matrix, _: Settings) -> QuantisedForm:
    """NVFP4: two e2m1 numbers per byte, e4m3 scales, and one scale of the matrix."""
    numbers = "weight_packed" if "weight_packed" in m.tensors else "weight"
    whole = "weight_global_scale" if "weight_global_scale" in m.tensors else "weight_scale_2"
    out, half = m.rows_and_columns(numbers)
    m.check(numbers, "U8", out, half)
    if prod(m.tensors[whole].shape) != 1:
        raise m.refused(f"{whole} has shape {list(m.tensors[whole].shape)}, not one number")
    m.check(whole, "F32", *m.tensors[whole].shape)
    m.check("weight_scale", "F8_E4M3", out, -(-2 * half // _FP4_GROUP))
    if "pre_quant_scale" in m.tensors:
        m.check("pre_quant_scale", _FLOATS, 2 * half)
    return m.form("NVFP4", (out, 2 * half), 4, (1, _FP4_GROUP), "weight_scale")


_LAYOUTS = {
    "qweight": (_gptq, {"qweight", "qzeros", "scales"}, {"g_idx"}),
    "weight_global_scale": (
        _nvfp4,
        {"weight_packed", "weight_scale", "weight_global_scale"},
        set(),
    ),
    "weight_scale_2": (_nvfp4, {"weight", "weight_scale", "weight_scale_2"}, {"pre_quant_scale"}),
    "weight_packed": (_pack_quantized, {"weight_packed", "weight_scale", "weight_shape"}, set()),
    "weight_scale": (_fp8, {"weight", "weight_scale"}, set()),
    "weight_scale_inv": (_fp8, {"weight", "weight_scale_inv"}, set()),
}
"""Each form's reader, required and optional endings, by the first ending present."""
_ENDINGS = {ending for _, must, may in _LAYOUTS.values() for ending in must | may} - {"weight"} | {
    "weight_zero_point",  # of unsupported forms
    "weight_g_idx",
}
