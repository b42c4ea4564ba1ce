"""Matrices that keep a checkpoint's own 4-bit and 8-bit numbers in dtypes int8 and int4.

A decoder matrix keeps its published integers if every stored part is (a) int4 in equal groups, a
multiple of 32, or (b) int8 around 0 with a scale a row. Every other one is widened to the weights
that its numbers stand for, and rounded like the weights of any checkpoint. In the other dtypes all
are widened.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import ShardReader
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.checkpoint.numbers import IntegerMatrix
from qwen3_omni_neuron.checkpoint.parameters import copy_piece
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm
from qwen3_omni_neuron.cpu.packing import Groups, grouped_shape, pack_mixed_groups
from qwen3_omni_neuron.cpu.precision import ORDER, WeightForm, packed_matrix
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.moe import SCALE

_SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def published_form(
    form: WeightForm, pieces: Sequence[Piece], quantised: Mapping[str, QuantisedForm]
) -> WeightForm:
    """Return the form of a parameter that keeps its published numbers, else the form given.

    A matrix that was published in other numbers than FP8 is never compact: too many are zero.
    pieces: stored matrices of the parameter. quantised: Checkpoint.quantised.
    """
    stored = [quantised[piece.name] for piece in pieces if piece.name in quantised]
    if not all(matrix.floating and matrix.bits == 8 for matrix in stored):
        form = form.plain
    if not form.may_be_published or len(stored) < len(pieces):
        return form
    if all(matrix.has_int8_rows for matrix in stored):
        return replace(form, kept_as=torch.int8, groups=None, published=True)
    sizes = {matrix.block[1] for matrix in stored if _are_groups_of_int4(matrix)}
    if not all(map(_are_groups_of_int4, stored)) or len(sizes) > 1:
        return form
    types = {matrix.scale for matrix in stored}
    groups = Groups(
        sizes.pop(),
        _SCALE_TYPES[types.pop()] if len(types) == 1 else torch.float32,
        any(matrix.zero_points for matrix in stored),
    )
    ordered = any(matrix.ordered for matrix in stored)
    return replace(form, kept_as=torch.uint8, groups=groups, published=True, ordered=ordered)


def read_published(
    form: WeightForm,
    target: str,
    shape: torch.Size,
    pieces: Sequence[Piece],
    reader: ShardReader,
) -> dict[str, Tensor]:
    """Read a parameter's published numbers. Returns the tensors kept for it, by name.

    form: what `published_form` returned. shape: shape of the parameter in its module. It takes
    memory for the parameter's numbers, twice, and for one stored matrix. Raises CheckpointError for
    matrices that the C computes as one but whose inputs have different orders, or for another shape
    than config.json says.
    """
    assert form.published and form.matrix is not None
    groups, (*stack, out, into) = form.groups, form.matrix
    count = 1 if groups is None else -(-into // groups.size)
    scale_type = torch.float32 if groups is None else groups.scale
    numbers = torch.empty(shape, dtype=torch.int8)
    scale = torch.empty((*shape[:-1], count), dtype=scale_type)
    zeros = torch.zeros_like(scale, dtype=torch.int8) if groups and groups.zero_points else None
    group_of = []
    for piece in pieces:
        matrix = reader.numbers(piece.name)
        copy_piece(numbers, piece, matrix.numbers)
        scale[piece.region] = matrix.scale.to(scale_type)
        if zeros is not None and matrix.zero_points is not None:
            zeros[piece.region] = matrix.zero_points.to(torch.int8)
        group_of.append(_groups_of(matrix))
    reader.trim()
    numbers = numbers.view(form.matrix)
    if groups is None:
        packed = packed_matrix(numbers, torch.int8)
        return {target: packed, target + SCALE: scale.view(form.matrix[:-1])}
    matrices = prod(stack)
    orders = _of_each(matrices, group_of, pieces)
    blocks = torch.empty(grouped_shape(form.matrix, groups), dtype=torch.uint8)
    order = torch.empty((matrices, into), dtype=torch.int32)
    flat = blocks.view(matrices, *blocks.shape[-3:])
    scale = scale.view(matrices, out, count)
    for index, one in enumerate(numbers.view(matrices, out, into)):
        points = None if zeros is None else zeros.view(scale.shape)[index]
        try:
            flat[index], found = pack_mixed_groups(one, scale[index], groups, orders[index], points)
        except ValueError as error:
            raise CheckpointError(
                f"{pieces[0].name} can't be kept as it is: {error}. Load the checkpoint with "
                'dtype "mixed", which widens it.'
            ) from error
        order[index] = torch.arange(into) if found is None else found
    kept = {target: blocks}
    if form.ordered:
        kept[target + ORDER] = order.view(*stack, into)
    return kept


def _are_groups_of_int4(form: QuantisedForm) -> bool:
    return form.bits == 4 and form.block[1] % 32 == 0


def _groups_of(matrix: IntegerMatrix) -> Tensor:
    if matrix.group_of is not None:
        return matrix.group_of
    return torch.arange(matrix.numbers.shape[1]) // matrix.size


def _of_each(
    matrices: int, group_of: Sequence[Tensor], pieces: Sequence[Piece]
) -> Sequence[Tensor]:
    """Return the groups of the inputs of each packed matrix, from those of the stored matrices.

    Each packed matrix is a stored one, or the only one is made of several, which must agree.
    """
    if len(group_of) == matrices:
        return group_of
    assert matrices == 1
    if any(not torch.equal(one, group_of[0]) for one in group_of):
        raise CheckpointError(
            f"{', '.join(piece.name for piece in pieces)} are computed as one matrix, and their "
            "inputs are in groups of different orders (g_idx). Load the checkpoint with dtype "
            '"mixed", which widens them.'
        )
    return group_of[:1]


def kept_names(
    forms: Mapping[str, WeightForm], pieces: Iterable[tuple[str, Sequence[Piece]]]
) -> set[str]:
    """Return the names of the stored matrices whose published numbers are kept.

    forms: form of each parameter of a part, by name. pieces: stored matrices of each parameter.
    """
    return {p.name for target, stored in pieces if forms[target].published for p in stored}
