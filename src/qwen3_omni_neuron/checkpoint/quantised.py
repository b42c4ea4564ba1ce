"""The published form of each quantised matrix of a checkpoint, told by what its files hold.

A matrix has several tensors, whose names are that of its layer and an ending:

    form              endings                                              value
    GPTQ (*)          qweight qzeros scales, perhaps g_idx                 scale * (q - (z + 1))
    GPTQ v2           the same                                             scale * (q - z)
    AWQ               qweight qzeros scales                                scale * (q - z)
    pack-quantized    weight_packed weight_scale weight_shape, perhaps     scale * (q - z)
                      weight_zero_point and weight_g_idx
    int8, FP8         weight weight_scale, int8 perhaps with               scale * (q - z)
                      weight_zero_point
    block FP8         weight weight_scale_inv                              scale * q, or q / scale
    NVFP4             weight_packed weight_scale weight_global_scale       scale / global * q
    NVFP4, modelopt   weight weight_scale weight_scale_2, perhaps          scale * global * q,
                      pre_quant_scale of the inputs                        times that of its input

(*) And auto-round's files with the packing "auto_round:auto_gptq". Their scales have either sign.
Its packing "auto_round", which it writes where zero points are free (sym False), is as GPTQ v2.

Every matrix has its form from its own tensors: files in which some matrices are quantised are the
rule. The settings (quantization_config of config.json) say only what the tensors do not: how
qweight is packed, whether 1 is missing from its zero points, and the sizes of groups that do not
divide a row. Scales of activations and of a KV cache are left aside: here neither is rounded. So a
checkpoint of 4-bit weights and activations is read as one of 4-bit weights alone.

Nothing but headers and the tensors weight_shape, of two numbers each, is read here.
checkpoint.numbers reads the values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.headers import StoredTensor, read_integers
from qwen3_omni_neuron.checkpoint.json_files import read_json, reason
from qwen3_omni_neuron.checkpoint.other_kinds import refuse_mlx
from qwen3_omni_neuron.errors import CheckpointError, format_value

WEIGHT = ".weight"
READ_WITH_HEADERS = "weight_shape"
"""Ending of the tensors whose numbers are read to tell a form."""
_OF_INPUTS = ("input_scale", "input_global_scale")
_OF_ACTIVATIONS = (*_OF_INPUTS, "output_scale", "k_scale", "v_scale")
_SCALES = ("F16", "BF16", "F32")
_WORDS = ("I32",)
_E4M3 = "F8_E4M3"
_NUMBERS = {_E4M3: True, "I8": False}  # types of a weight with a scale; True: floating
_PLAIN = ("BF16", "F16", "F32", "F64")
_METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt")
_PACKINGS = {
    ("gptq", "gptq"): "GPTQ",
    ("gptq", "gptq_v2"): "GPTQ v2",
    ("auto-round", "auto_round:auto_gptq"): "GPTQ",
    ("auto-round", "auto_round"): "GPTQ v2",
    ("auto-round", "auto_round:auto_awq"): "AWQ",
    ("awq", "gemm"): "AWQ",
}
_BLOCK = (128, 128)
_FP4_GROUP = 16
WORD_BITS = 32


@dataclass(frozen=True)
class QuantisedForm:
    """The form of one quantised matrix [out, into].

    layer: name of the matrix without an ending. endings: endings of its tensors. label: name of the
    form for people. bits: size of a number. floating: True for numbers of FP8 (e4m3) and NVFP4
    (e2m1), False for integers. block: how many rows and inputs share a scale. scale: safetensors'
    name of the scales' type. zero_points: whether some zero points may differ from the middle.
    one_less: whether stored zero points are less by 1. ordered: whether a tensor names the group of
    each input, in any order. bytes: size of all its tensors.
    """

    layer: str
    endings: frozenset[str]
    label: str
    shape: tuple[int, int]
    bits: int
    block: tuple[int, int]
    scale: str
    bytes: int
    floating: bool = False
    zero_points: bool = False
    one_less: bool = False
    ordered: bool = False

    @property
    def has_int8_rows(self) -> bool:
        """True for 8-bit integers around 0 with a scale for whole rows."""
        a_row = self.block[0] in (1, self.shape[0]) and self.block[1] == self.shape[1]
        return a_row and self.bits == 8 and not (self.floating or self.zero_points)


@dataclass(frozen=True)
class QuantisationSettings:
    """Settings of a checkpoint's quantization_config on which formulas depend. None: not said.

    packing: how qweight is packed. group_size: number of inputs that share a scale. block: rows and
    inputs of a block of FP8. symmetric: whether all zero points of qweight are in the middle.
    ordered: whether g_idx may be in any order.
    """

    packing: str | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = False
    ordered: bool = True


def read_settings(folder: Path) -> QuantisationSettings | None:
    """Read the quantisation settings of a checkpoint; None where it has none.

    They are in config.json, or alone in quantization_config.json or hf_quant_config.json. Raises
    CheckpointError for a method or a packing that is not implemented.
    """
    found = find_settings(folder)
    if found is None:
        return None
    _, raw = found
    method = str(raw.get("quant_method") or _producer(raw)).removeprefix("intel/")
    if method not in _METHODS:
        raise CheckpointError(
            f"{folder} is quantised by the method {method!r}; implemented: {', '.join(_METHODS)}. "
            "Take a checkpoint in one of these, or the one in bfloat16."
        )
    try:
        return _settings(method, raw)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"quantization_config of {folder} can't be used: {error}. Take the one that belongs to "
            "the checkpoint."
        ) from error


def scales_of_inputs(names: Iterable[str]) -> int:
    """Return how many matrices have a scale by which their inputs would be rounded."""
    return sum(name.rpartition(".")[2] in _OF_INPUTS for name in names)


def quantised_forms(
    tensors: Mapping[str, StoredTensor], settings: QuantisationSettings
) -> tuple[dict[str, QuantisedForm], set[str]]:
    """Tell the form of every quantised matrix.

    Returns the forms by the released name of the matrix, which ends in ".weight", and the names of
    all tensors that belong to them or to activations. Raises CheckpointError for a form that is
    not understood, and names its first matrix.
    """
    layers: dict[str, set[str]] = {}
    for name in tensors:
        layer, _, ending = name.rpartition(".")
        if ending in _ENDINGS and ending not in _OF_ACTIVATIONS:
            layers.setdefault(layer, set()).add(ending)
    forms: dict[str, QuantisedForm] = {}
    used = {n for n in tensors if n.rpartition(".")[2] in _OF_ACTIVATIONS}
    for layer, endings in layers.items():
        if layer + WEIGHT in tensors:
            endings.add("weight")
        forms[layer + WEIGHT] = _form(_Matrix(layer, endings, tensors, settings))
        used |= {f"{layer}.{ending}" for ending in endings}
    for name, stored in tensors.items():
        if name not in used and stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{name} is of type {stored.dtype}, and no scale belongs to it. A file is missing, "
                "or it is in a form that is not implemented: take another checkpoint."
            )
    return forms, used


class _Matrix:
    """The tensors of one matrix: shapes and types by ending, and errors that name it."""

    def __init__(
        self,
        layer: str,
        endings: set[str],
        tensors: Mapping[str, StoredTensor],
        settings: QuantisationSettings,
    ):
        self.layer, self.endings, self.settings = layer, frozenset(endings), settings
        self._tensors = {ending: tensors[f"{layer}.{ending}"] for ending in endings}
        self.bytes = sum(stored.bytes for stored in self._tensors.values())

    def __getitem__(self, ending: str) -> StoredTensor:
        return self._tensors[ending]

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.layer} has {', '.join(sorted(self.endings))}: {what}. Take a checkpoint in "
            "another form, or the one in bfloat16."
        )

    def rows_and_columns(self, ending: str) -> tuple[int, int]:
        shape = self[ending].shape
        if len(shape) != 2:
            raise self.refused(f"{ending} has shape {list(shape)}, and not two axes")
        return shape[0], shape[1]

    def type_of(self, ending: str, known: Iterable[str] = _SCALES) -> str:
        """Return the type of a tensor, one of those that are known."""
        dtype = self[ending].dtype
        if dtype not in known:
            raise self.refused(f"{ending} is of type {dtype}; implemented: {', '.join(known)}")
        return dtype

    def check_shape(self, ending: str, *expected: int) -> None:
        if self[ending].shape != expected:
            raise self.refused(
                f"{ending} has shape {list(self[ending].shape)}, and {list(expected)} was expected"
            )

    def check_bits(self, bits: int, known: tuple[int, ...]) -> None:
        if bits not in known:
            numbers = " and ".join(map(str, known))
            raise self.refused(f"its numbers have {bits} bits; implemented: {numbers}")

    def group_size(self, into: int, groups: int) -> int:
        """Return how many inputs share a scale."""
        said = self.settings.group_size
        if said and said > 0 and -(-into // said) == groups:
            return said
        if not groups or into % groups:
            raise self.refused(f"{into} inputs are in {groups} groups of unknown size")
        return into // groups


def _form(m: _Matrix) -> QuantisedForm:
    for telling, (read, must, may) in _LAYOUTS.items():
        if telling in m.endings:
            if lacking := must - m.endings:
                raise m.refused(f"{', '.join(sorted(lacking))} is missing")
            if unknown := m.endings - must - may:
                raise m.refused(f"{', '.join(sorted(unknown))} is not understood")
            return read(m)
    raise m.refused("its numbers are missing, or its form is not implemented")


def _words_of_columns(m: _Matrix) -> QuantisedForm:
    """Return the form of GPTQ or AWQ."""
    packing = m.settings.packing
    if packing is None:
        raise m.refused("no quantization_config says how qweight is packed")
    m.type_of("qweight", _WORDS)
    m.type_of("qzeros", _WORDS)
    groups, out = m.rows_and_columns("scales")
    bits = m.rows_and_columns("qzeros")[1] * WORD_BITS // out
    m.check_bits(bits, (4,) if packing == "AWQ" else (4, 8))
    m.check_shape("qzeros", groups, out * bits // WORD_BITS)
    into = m["qweight"].shape[0]
    if packing == "AWQ":
        m.check_shape("qweight", into, out * bits // WORD_BITS)
        if "g_idx" in m.endings:
            raise m.refused("AWQ has no g_idx")
    else:
        into = into * WORD_BITS // bits
        m.check_shape("qweight", into * bits // WORD_BITS, out)
    if "g_idx" in m.endings:
        m.check_shape("g_idx", into)
    return QuantisedForm(
        m.layer,
        m.endings,
        packing,
        (out, into),
        bits,
        (1, m.group_size(into, groups)),
        m.type_of("scales"),
        m.bytes,
        zero_points=not m.settings.symmetric,
        one_less=packing == "GPTQ",
        ordered="g_idx" in m.endings and m.settings.ordered,
    )


def _words_of_rows(m: _Matrix) -> QuantisedForm:
    """Return the form of compressed-tensors' pack-quantized."""
    m.type_of("weight_packed", _WORDS)
    m.check_shape(READ_WITH_HEADERS, 2)
    try:
        out, into = read_integers(m[READ_WITH_HEADERS])
    except (OSError, ValueError) as error:
        raise m.refused(f"weight_shape can't be read ({error})") from error
    words = m.rows_and_columns("weight_packed")[1]
    bits = words * WORD_BITS // max(into, 1)
    m.check_bits(bits, (4, 8))
    m.check_shape("weight_packed", out, -(-into * bits // WORD_BITS))
    rows, groups = m.rows_and_columns("weight_scale")
    m.check_shape("weight_scale", out, groups)
    if "weight_zero_point" in m.endings:
        m.type_of("weight_zero_point", _WORDS)
        m.check_shape("weight_zero_point", -(-rows * bits // WORD_BITS), groups)
    if "weight_g_idx" in m.endings:
        m.check_shape("weight_g_idx", into)
    return QuantisedForm(
        m.layer,
        m.endings,
        "pack-quantized",
        (out, into),
        bits,
        (1, m.group_size(into, groups)),
        m.type_of("weight_scale"),
        m.bytes,
        zero_points="weight_zero_point" in m.endings,
        ordered="weight_g_idx" in m.endings,
    )


def _scaled(m: _Matrix) -> QuantisedForm:
    """Return the form of int8 or FP8 numbers with scales beside them."""
    out, into = m.rows_and_columns("weight")
    dtype = m.type_of("weight", _NUMBERS)
    ending = "weight_scale_inv" if "weight_scale_inv" in m.endings else "weight_scale"
    block = _block(m, ending, (out, into))
    if "weight_zero_point" in m.endings:
        if m["weight_zero_point"].dtype != "I8" or _NUMBERS[dtype]:
            raise m.refused("weight_zero_point is implemented for int8 numbers, and in int8")
        m.check_shape("weight_zero_point", *m[ending].shape)
        if block[0] not in (1, out):
            raise m.refused("zero points of blocks of rows are not implemented")
    kind = "FP8" if _NUMBERS[dtype] else "int8"
    return QuantisedForm(
        m.layer,
        m.endings,
        f"block {kind}" if block[0] not in (1, out) else kind,
        (out, into),
        8,
        block,
        m.type_of(ending),
        m.bytes,
        floating=_NUMBERS[dtype],
        zero_points="weight_zero_point" in m.endings,
    )


def _fp4(m: _Matrix) -> QuantisedForm:
    """Return the form of NVFP4: two e2m1 numbers a byte, e4m3 scales, and one of the matrix."""
    numbers = "weight_packed" if "weight_packed" in m.endings else "weight"
    whole = "weight_global_scale" if "weight_global_scale" in m.endings else "weight_scale_2"
    m.type_of(numbers, ("U8",))
    m.type_of(whole, ("F32",))
    if prod(m[whole].shape) != 1:
        raise m.refused(f"{whole} has shape {list(m[whole].shape)}, and not one number")
    out, half = m.rows_and_columns(numbers)
    m.check_shape("weight_scale", out, -(-2 * half // _FP4_GROUP))
    if "pre_quant_scale" in m.endings:
        m.type_of("pre_quant_scale")
        m.check_shape("pre_quant_scale", 2 * half)
    return QuantisedForm(
        m.layer,
        m.endings,
        "NVFP4",
        (out, 2 * half),
        4,
        (1, _FP4_GROUP),
        m.type_of("weight_scale", (_E4M3,)),
        m.bytes,
        floating=True,
    )


_LAYOUTS = {
    "qweight": (_words_of_columns, {"qweight", "qzeros", "scales"}, {"g_idx"}),
    "weight_global_scale": (_fp4, {"weight_packed", "weight_scale", "weight_global_scale"}, set()),
    "weight_scale_2": (_fp4, {"weight", "weight_scale", "weight_scale_2"}, {"pre_quant_scale"}),
    "weight_packed": (
        _words_of_rows,
        {"weight_packed", "weight_scale", "weight_shape"},
        {"weight_zero_point", "weight_g_idx"},
    ),
    "weight_scale": (_scaled, {"weight", "weight_scale"}, {"weight_zero_point"}),
    "weight_scale_inv": (_scaled, {"weight", "weight_scale_inv"}, set()),
}
"""Reader of a form, and endings that a matrix must and may have, by the ending that tells the form.

The first of these endings that a matrix has tells it.
"""
_ENDINGS = {
    *(ending for _, must, may in _LAYOUTS.values() for ending in must | may),
    *_OF_ACTIVATIONS,
} - {"weight"}


def _block(m: _Matrix, ending: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and inputs that share a scale."""
    (out, into), scale = shape, m[ending].shape
    if prod(scale) == 1:
        return shape
    if len(scale) > 2:
        raise m.refused(f"{ending} has shape {list(scale)}, and more than two axes")
    rows, columns = scale if len(scale) == 2 else (scale[0], 1)
    if rows == out:
        return 1, m.group_size(into, columns)
    block = m.settings.block or _BLOCK
    if (-(-out // block[0]), -(-into // block[1])) != (rows, columns):
        raise m.refused(
            f"{ending} has shape {list(scale)}, and a matrix of {out} by {into} has other blocks "
            f"of {block[0]} by {block[1]}"
        )
    return block


def find_settings(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file that has a checkpoint's quantisation settings, and them. None without any.

    Raises CheckpointError for a file that can't be read, and for MLX.
    """
    for name, key in (
        ("config.json", "quantization_config"),
        ("quantization_config.json", None),
        ("hf_quant_config.json", None),
    ):
        try:
            raw = read_json(folder / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder / name} can't be read: {reason(error)}. Download it again."
            ) from error
        if key and isinstance(raw, Mapping):
            refuse_mlx(folder, raw)
        found = raw.get(key) if key and isinstance(raw, Mapping) else raw
        if isinstance(found, Mapping):
            return name, found
    return None


def _producer(raw: Mapping[str, Any]) -> Any:
    producer = raw.get("producer")
    return producer.get("name") if isinstance(producer, Mapping) else None


def _settings(method: str, raw: Mapping[str, Any]) -> QuantisationSettings:
    groups = [group.get("weights") or {} for group in raw.get("config_groups", {}).values()]
    sizes = {group.get("group_size") for group in groups}
    size = raw.get("group_size", sizes.pop() if len(sizes) == 1 else None)
    if type(size) is not int and size is not None:
        raise ValueError(f"its group_size is {format_value(size)}, and not a whole number")
    blocks = {tuple(group.get("block_structure") or ()) for group in groups}
    block = tuple(raw.get("weight_block_size") or (blocks.pop() if len(blocks) == 1 else ()))
    if block and not (len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ValueError(f"its blocks are {format_value(block)}, and not rows and inputs")
    own = raw.get("extra_config") or {}
    return QuantisationSettings(
        packing=_packing(method, raw),
        group_size=size,
        block=block or None,
        symmetric=bool(raw.get("sym")) and all(e.get("sym", True) for e in own.values()),
        ordered=method != "gptq" or bool(raw.get("desc_act", True)),
    )


def _packing(method: str, raw: Mapping[str, Any]) -> str | None:
    """Return how qweight is packed; None for methods without it."""
    names = {
        "gptq": raw.get("checkpoint_format", "gptq"),
        "auto-round": raw.get("packing_format"),
        "awq": raw.get("version", raw.get("format", "gemm")),
    }
    if method not in names:
        return None
    name = str(names[method]).lower()
    if (method, name) not in _PACKINGS:
        known = ", ".join(packing for of, packing in _PACKINGS if of == method)
        raise ValueError(f"the packing of {method} is {name!r}; implemented: {known}")
    return _PACKINGS[method, name]
