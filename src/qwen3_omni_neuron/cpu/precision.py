"""The dtypes of the CPU: type and memory layout of each weight.

    dtype      weights                                            arithmetic  computed by
    mixed      bfloat16, but norms and biases float32             float32     C
    float32    float32                                            float32     C
    int8       as mixed; matrices of encoders and decoders int8   float32*    C
    int4       as int8; thinker's attention and experts int4      float32*    C
    bfloat16   bfloat16                                           bfloat16    torch
    float64    float64                                            float64     torch

* Inputs of int8 and int4 matrices are rounded (cpu.rounded_inputs) and multiplied as integers.

With int8, int4 and bfloat16 the code predictor defaults to `mixed`, and computes in float32: the
released one has an activation of about 49,000, with which int8 in any group of matrices changes too
many codes, even with mixed down projections (bench.quantisation, outlier).

Weights for the C are packed (cpu.packing), bfloat16 matrices in 12 bits where lossless
(cpu.compact). Without the library they are widened to float32 at load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.checkpoint.parameters import Part
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm
from qwen3_omni_neuron.checkpoint.tensor_file import Layout
from qwen3_omni_neuron.compilation.plan import SAME
from qwen3_omni_neuron.cpu.compact import compact_shape, unpack_compact
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.packing import (
    Groups,
    grouped_shape,
    pack,
    pack_groups,
    packed_shape,
    quantise_groups,
    unpack,
    unpack_groups,
)
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.moe import SCALE, MoeFeedForward

_ENCODERS = ("audio_encoder", "vision_encoder")
_DECODERS = ("thinker", "talker", "code_predictor")
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d, nn.Conv2d)
_SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
GROUPS = "_groups"
"""Suffix of an int4 parameter's attribute with its format."""


@dataclass(frozen=True)
class Precision:
    """Weight types of one dtype.

    matrices: type of matrices, convolutions and tables of rows. others: type of norms, biases
    and arithmetic. packed: matrices are laid out for the C. large: kind (see WeightForm) of most
    matrices of encoders, thinker, talker and code predictor. layers: kind in the thinker's layers.
    """

    matrices: torch.dtype
    others: torch.dtype
    packed: bool
    large: str = "panels"
    layers: str = "panels"


_MIXED = Precision(torch.bfloat16, torch.float32, packed=True)
PRECISIONS = {
    "mixed": _MIXED,
    "float32": Precision(torch.float32, torch.float32, packed=True),
    "int8": replace(_MIXED, large="int8", layers="int8"),
    "int4": replace(_MIXED, large="int8", layers="int4"),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, packed=False),
    "float64": Precision(torch.float64, torch.float64, packed=False),
}


@dataclass(frozen=True)
class WeightForm:
    """Form of one parameter in memory and in trees.

    kind: "whole", in the module's shape; or a packed matrix: "panels", "compact" (panels if lossy),
    "int8", "int4", or "published", int4 with the checkpoint's own numbers. dtype: to which its
    values are rounded first. shape: the module's. matrix: shape [..., out, into] before packing.
    groups: format of an int4 or published one.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    matrix: tuple[int, ...] = ()
    groups: Groups = field(default_factory=Groups)

    @property
    def plain(self) -> "WeightForm":
        """The form of a matrix without a compact one."""
        return replace(self, kind="panels") if self.kind == "compact" else self

    def read(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that `keep` expects of a parameter stored as `stored`.

        A bfloat16 matrix stays bfloat16 until packing widens it.
        """
        widened = self.kind == "panels" and self.dtype == torch.float32
        return stored if widened and stored == torch.bfloat16 else self.dtype

    def layout(self, target: str) -> Layout:
        """Return shape and dtype of a parameter's kept tensors, by name."""
        match self.kind:
            case "whole":
                return {target: (self.shape, self.dtype)}
            case "compact":
                return {target: (compact_shape(self.matrix), torch.uint8)}
            case "int4" | "published":
                return {target: (grouped_shape(self.matrix, self.groups), torch.uint8)}
            case "int8":
                scale = self.matrix[:-1], torch.float32
                return {target: (packed_shape(self.matrix), torch.int8), target + SCALE: scale}
        return {target: (packed_shape(self.matrix), self.dtype)}

    def keep(self, target: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a parameter's kept tensors, by name."""
        if self.kind == "whole":
            return {target: tensor}
        matrix = tensor.view(self.matrix)
        match self.kind:
            case "int4":
                return {target: _packed_groups(matrix, self.groups)}
            case "int8":
                rounded, scale = quantise(matrix)
                return {target: _panels(rounded, torch.int8), target + SCALE: scale}
            case "compact" if (packed := _packed_compact(matrix)) is not None:
                return {target: packed}
        return {target: _panels(matrix, self.dtype)}

    def widen(self, kept: Mapping[str, Tensor], target: str) -> Tensor:
        """Return a parameter in float32 and the module's shape, from its kept tensors."""
        if self.kind == "whole":
            return kept[target].float()
        if self.kind in ("int4", "published"):
            out, into = self.matrix[-2:]
            wide = unpack_groups(kept[target], out, into, self.groups)
        elif kept[target].dtype == torch.uint8:
            wide = unpack_compact(kept[target], self.matrix, torch.float32)
        else:
            wide = unpack(kept[target], self.matrix[-2]).float()
        if target + SCALE in kept:
            wide *= kept[target + SCALE].unsqueeze(-1)
        return wide.view(self.shape)


def part_precision(part: str, dtype: str, predictor_dtype: str = SAME) -> Precision:
    """Return the precision of a part of checkpoint.modules.Models.

    Unpacked weights are in `dtype`, whatever predictor_dtype.
    """
    precision = PRECISIONS[dtype]
    own = part == "code_predictor" and predictor_dtype != SAME and precision.packed
    return PRECISIONS["mixed"] if own else precision


def library_for(dtype: str) -> Any:
    """Return the compiled library if it computes this dtype."""
    return find_library() if PRECISIONS[dtype].packed else None


def _panels(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack a matrix [..., out, into] in C or torch: the same bytes."""
    library = find_library()
    if library is None:
        return pack(matrix, dtype)
    from qwen3_omni_neuron.cpu.native.binding import pack_in_c

    return pack_in_c(matrix, library, dtype)


def _packed_groups(matrix: Tensor, groups: Groups) -> Tensor:
    library = find_library()
    if library is None:
        return pack_groups(*quantise_groups(matrix, groups), groups)
    from qwen3_omni_neuron.cpu.native.binding import quantise_in_c

    return quantise_in_c(matrix, library, groups)


def _packed_compact(matrix: Tensor) -> Tensor | None:
    """Return the compact form, computed in C; None without the library or a compact form."""
    if (library := find_library()) is None:
        return None
    from qwen3_omni_neuron.cpu.native.binding import pack_compact_in_c

    return pack_compact_in_c(matrix, library)


def weight_form(
    precision: Precision,
    part: str,
    module: nn.Module,
    target: str,
    stored: Sequence[QuantisedForm | None] = (),
) -> WeightForm:
    """Return the form of a parameter of a part.

    stored: published form of each of its stored matrices, None for weights. With int8 and int4 a
    thinker's matrix keeps its numbers if all are int4 in groups of one size. Only FP8 numbers may
    be compact: in other forms too many are zero.
    """
    owner_name, _, name = target.rpartition(".")
    owner = module.get_submodule(owner_name)
    shape = tuple(module.get_parameter(target).shape)
    if not _is_matrix(owner, name) or part == "code2wav":
        # Torch interpolates the vision encoder's table. Code2wav packs the other matrices itself.
        is_table = isinstance(owner, nn.Embedding) or name == "embedding"
        is_convolution = isinstance(owner, _CONVOLUTIONS) and name == "weight"
        small = (is_table and part != "vision_encoder") or _is_matrix(owner, name) or is_convolution
        return WeightForm("whole", precision.matrices if small else precision.others, shape)
    if not precision.packed:
        return WeightForm("whole", precision.matrices, shape)
    *stack, out, into = shape
    matrix = (*stack, 2, out // 2, into) if "gate_up" in target else shape
    form = WeightForm("panels", precision.matrices, shape, matrix)
    exact = "router" in target or out == 1  # a router, or a shared expert's gate
    exact = exact or (part == "code_predictor" and target.endswith("down.weight"))
    if part in _ENCODERS or (part in _DECODERS and not exact):
        in_layers = part == "thinker" and owner_name != "head"
        form = replace(form, kind=precision.layers if in_layers else precision.large)
        if in_layers and form.kind != "panels" and (groups := _published_groups(stored)):
            return replace(form, kind="published", groups=groups)
    few_zeros = all(one is None or "FP8" in one.label for one in stored)
    may_be_compact = form.kind == "panels" and form.dtype == torch.bfloat16 and into % 4 == 0
    smaller = prod(compact_shape(matrix)) < 2 * prod(packed_shape(matrix))
    if few_zeros and may_be_compact and smaller:
        return replace(form, kind="compact")
    return form


def _published_groups(stored: Sequence[QuantisedForm | None]) -> Groups | None:
    forms = [form for form in stored if form is not None and form.are_groups_of_int4]
    sizes = {form.block[1] for form in forms}
    if len(forms) < max(len(stored), 1) or len(sizes) > 1:
        return None
    types = {_SCALE_TYPES[form.scale] for form in forms}
    return Groups(sizes.pop(), types.pop() if len(types) == 1 else torch.float32)


def weight_forms(
    precision: Precision, name: str, part: Part, quantised: Mapping[str, QuantisedForm]
) -> dict[str, WeightForm]:
    """Return a part's forms by parameter. quantised: Checkpoint.quantised."""
    return {
        target: weight_form(
            precision, name, part.module, target, [quantised.get(piece.name) for piece in pieces]
        )
        for target, pieces in part.pieces
    }


def _is_matrix(owner: nn.Module, name: str) -> bool:
    if isinstance(owner, MoeFeedForward):
        return name in ("gate_up", "down")
    if isinstance(owner, CodePredictor):
        return name == "head"
    return isinstance(owner, nn.Linear) and name == "weight"
