"""The dtypes of the CPU: type and memory layout of each weight.

    dtype      weights                                            arithmetic  computed by
    mixed      bfloat16, but norms and biases float32             float32     C
    float32    float32                                            float32     C
    int8       as mixed; matrices of encoders and decoders int8   float32     C
    int4       as int8; thinker's attention and experts int4      float32     C
    bfloat16   bfloat16                                           bfloat16    torch
    float64    float64                                            float64     torch

With int8, int4 and bfloat16 the code predictor defaults to `mixed` (CompilePlan.predictor_dtype),
and computes in float32. The released one has an activation of about
49,000, under which int8 in any group of its matrices changes more codes than frames can bear,
though its down projections stay as in mixed (bench.quantisation, outlier).

Weights for the C are packed (see cpu.packing), their bfloat16 matrices in 12 bits a number where
that loses nothing (see cpu.compact), unless CompilePlan.compact is false. Without the compiled
library torch computes all of them: packed weights are unpacked and widened to float32 when they are
loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.rounding import quantise
from qwen3_omni_neuron.checkpoint.tensor_file import Layout
from qwen3_omni_neuron.compilation.plan import SAME
from qwen3_omni_neuron.cpu.compact import compact_shape, pack_compact, unpack_compact
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.packing import (
    Groups,
    grouped_shape,
    in_own_order,
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
GROUPS = "_groups"
"""Ending of the name of an int4 parameter's format, an attribute of its module."""
ORDER = "_order"
"""Ending of the name of the order of an int8 or int4 parameter's inputs, where it has one."""


@dataclass(frozen=True)
class Precision:
    """Weight types of one dtype.

    matrices: type of matrices, convolutions and tables of rows. large: type of most matrices of
    the encoders, thinker, talker and code predictor. others: type of norms, biases and all
    arithmetic. packed: whether they are laid out for the C. groups: format of the matrices in the
    thinker's layers, None where it is `large`. published: whether matrices of decoders that a
    checkpoint has in int8 or int4 stay so; see cpu.published. compact: whether packed bfloat16
    matrices are kept in 12 bits a number where that loses nothing; see cpu.compact.
    """

    matrices: torch.dtype
    large: torch.dtype
    others: torch.dtype
    packed: bool
    groups: Groups | None = None
    published: bool = False
    compact: bool = False


_INT8 = Precision(torch.bfloat16, torch.int8, torch.float32, packed=True, published=True)
PRECISIONS = {
    "mixed": Precision(torch.bfloat16, torch.bfloat16, torch.float32, packed=True),
    "float32": Precision(torch.float32, torch.float32, torch.float32, packed=True),
    "int8": _INT8,
    "int4": replace(_INT8, groups=Groups()),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, packed=False),
    "float64": Precision(torch.float64, torch.float64, torch.float64, packed=False),
}


@dataclass(frozen=True)
class WeightForm:
    """Form of one parameter.

    read_as: type that the checkpoint's values are rounded to; see also `read`. kept_as: type in
    memory. matrix: shape [..., out, into] before packing; None: kept in the module's shape. groups:
    format of an int4 matrix, which is kept as bytes. may_be_published: whether it keeps the
    checkpoint's own numbers where cpu.published finds some; published: whether it does, so that
    cpu.published reads it in place of `keep`. ordered: whether the order of its inputs is kept
    beside it. compact: whether it is kept in the compact form, as bytes, where it has one: see
    `plain`.
    """

    read_as: torch.dtype
    kept_as: torch.dtype
    matrix: tuple[int, ...] | None
    groups: Groups | None = None
    may_be_published: bool = False
    published: bool = False
    ordered: bool = False
    compact: bool = False

    @property
    def plain(self) -> "WeightForm":
        """The form of a matrix that has no compact one."""
        return replace(self, compact=False)

    def read(self, stored: torch.dtype) -> torch.dtype:
        """Return the type that `keep` takes for a parameter stored in the checkpoint as `stored`.

        A bfloat16 matrix stays bfloat16 until packing widens it, which rounds nothing.
        """
        widened = self.matrix is not None and self.read_as == torch.float32
        return stored if widened and stored == torch.bfloat16 else self.read_as

    def layout(self, target: str, shape: torch.Size) -> Layout:
        """Return shape and type of the tensors kept for a parameter, by name."""
        if self.matrix is None:
            return {target: (tuple(shape), self.kept_as)}
        if self.compact:
            return {target: (compact_shape(self.matrix), torch.uint8)}
        kept: dict[str, tuple[Sequence[int], torch.dtype]]
        if self.groups is not None:
            kept = {target: (grouped_shape(self.matrix, self.groups), self.kept_as)}
            if self.ordered:
                kept[target + ORDER] = (*self.matrix[:-2], self.matrix[-1]), torch.int32
            return kept
        kept = {target: (packed_shape(self.matrix), self.kept_as)}
        if self.kept_as == torch.int8:
            kept[target + SCALE] = (self.matrix[:-1], torch.float32)
        return kept

    def keep(self, target: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors kept for a parameter, by name. tensor: the parameter as read."""
        if self.matrix is None:
            return {target: tensor}
        matrix = tensor.view(self.matrix)
        if self.groups is not None:
            return {target: _packed_groups(matrix, self.groups)}
        if self.compact and (packed := _compact_matrix(matrix)) is not None:
            return {target: packed}
        if self.kept_as != torch.int8:
            return {target: packed_matrix(matrix, self.kept_as)}
        rounded, scale = quantise(matrix)
        return {target: packed_matrix(rounded, torch.int8), target + SCALE: scale}

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return a parameter in float32 with the rounding of `keep`."""
        if self.matrix is None:
            return tensor.float()
        if self.groups is not None:
            return self.widen(self.keep("", tensor), "", tensor.shape)
        if self.kept_as != torch.int8:
            return tensor.float()
        whole, scale = quantise(tensor.view(self.matrix))
        return whole.float().mul_(scale.unsqueeze(-1)).view(tensor.shape)

    def widen(self, kept: Mapping[str, Tensor], target: str, shape: torch.Size) -> Tensor:
        """Return a parameter in float32 and in the module's shape, from the tensors kept for it."""
        if self.matrix is None:
            return kept[target].float()
        if self.groups is not None:
            out, into = self.matrix[-2:]
            wide = unpack_groups(kept[target], out, into, self.groups)
        elif kept[target].dtype == torch.uint8:
            wide = unpack_compact(kept[target], self.matrix, torch.float32)
        else:
            wide = unpack(kept[target], self.matrix[-2]).float()
        if target + SCALE in kept:
            wide *= kept[target + SCALE].unsqueeze(-1)
        if target + ORDER in kept:
            wide = in_own_order(wide, kept[target + ORDER])
        return wide.view(shape)


def part_precision(
    part: str, dtype: str, predictor_dtype: str = SAME, compact: bool = False
) -> Precision:
    """Return the precision of a part: the code predictor's may differ from the dtype's.

    part: its name in checkpoint.modules.Models. predictor_dtype, compact: see CompilePlan. Weights
    that are not packed are in `dtype` in either case.
    """
    precision = replace(PRECISIONS[dtype], compact=compact)
    if part == "code_predictor" and predictor_dtype != SAME and precision.packed:
        return replace(PRECISIONS["mixed"], published=precision.published, compact=compact)
    return precision


def library_for(dtype: str) -> Any:
    """Return the compiled library where it computes this dtype, None where torch does."""
    return find_library() if PRECISIONS[dtype].packed else None


def packed_matrix(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack a matrix [..., out, into] in C or, without the library, in torch: the same bytes."""
    library = find_library()
    if library is None:
        return pack(matrix, dtype)
    from qwen3_omni_neuron.cpu.native.binding import pack_in_c

    return pack_in_c(matrix, library, dtype)


def _compact_matrix(matrix: Tensor) -> Tensor | None:
    """Return `pack_compact`, in C or, without the library, in torch: the bytes are the same."""
    library = find_library()
    if library is None:
        return pack_compact(matrix)
    from qwen3_omni_neuron.cpu.native.binding import pack_compact_in_c

    return pack_compact_in_c(matrix, library)


def _packed_groups(matrix: Tensor, groups: Groups) -> Tensor:
    """Round a matrix to int4 and pack it, in C or in torch: the bytes are the same."""
    library = find_library()
    if library is None:
        return pack_groups(*quantise_groups(matrix, groups), groups)
    from qwen3_omni_neuron.cpu.native.binding import quantise_in_c

    return quantise_in_c(matrix, library, groups)


def weight_form(precision: Precision, part: str, module: nn.Module, target: str) -> WeightForm:
    """Return the form of a parameter. part: the module's name in checkpoint.modules.Models."""
    owner_name, _, name = target.rpartition(".")
    owner = module.get_submodule(owner_name)
    shape = tuple(module.get_parameter(target).shape)
    if _is_matrix(owner, name) and part != "code2wav":
        if "gate_up" in target:
            *stack, out, into = shape
            shape = (*stack, 2, out // 2, into)
        kept_as, keeps = precision.matrices, False
        exact = "router" in target or shape[-2] == 1  # a router, or a shared expert's gate
        exact = exact or (part == "code_predictor" and target.endswith("down.weight"))
        if part in _ENCODERS:
            kept_as = precision.large
        elif part in _DECODERS and not exact:
            kept_as, keeps = precision.large, precision.published
            if precision.groups is not None and part == "thinker" and owner_name != "head":
                return WeightForm(precision.matrices, torch.uint8, shape, precision.groups, keeps)
        matrix = shape if precision.packed else None
        form = WeightForm(precision.matrices, kept_as, matrix, may_be_published=keeps)
        return replace(form, compact=precision.compact and _may_be_compact(form))
    is_table = isinstance(owner, nn.Embedding) or name == "embedding"
    # The vision encoder's table is interpolated by torch. Matrices that are left are code2wav's,
    # and it packs them and its convolutions by itself, as the audio encoder does its convolutions.
    is_convolution = isinstance(owner, _CONVOLUTIONS) and name == "weight"
    small = (is_table and part != "vision_encoder") or _is_matrix(owner, name) or is_convolution
    kept_as = precision.matrices if small else precision.others
    return WeightForm(kept_as, kept_as, None)


def _may_be_compact(form: WeightForm) -> bool:
    """Return whether a matrix of this form may have a compact one, and that is smaller."""
    if form.matrix is None or form.kept_as != torch.bfloat16 or form.matrix[-1] % 4 != 0:
        return False
    return prod(compact_shape(form.matrix)) < 2 * prod(packed_shape(form.matrix))


def _is_matrix(owner: nn.Module, name: str) -> bool:
    if isinstance(owner, MoeFeedForward):
        return name in ("gate_up", "down")
    if isinstance(owner, CodePredictor):
        return name == "head"
    return isinstance(owner, nn.Linear) and name == "weight"
