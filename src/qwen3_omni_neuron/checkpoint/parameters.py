"""Read and convert stored tensors, and set them as modules' parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.checkpoint.numbers import check_finite
from qwen3_omni_neuron.errors import CheckpointError

LISTED_NAMES = 12  # names that an error lists


@dataclass(frozen=True)
class Part:
    """One module, and its parameters' pieces.

    prefixes: all released names with one of them must be used.
    """

    module: nn.Module
    pieces: Sequence[tuple[str, list[Piece]]]
    prefixes: tuple[str, ...]


def load_parts(parts: Iterable[Part], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Fill the parameters of modules on the meta device.

    Memory peaks at all parameters plus one parameter's stored tensors. Raises CheckpointError with
    missing and unused names, or the first tensor whose shape contradicts config.json.
    """
    parts = list(parts)
    check_names(parts, checkpoint)
    for part in parts:
        for target, tensor in converted(part, checkpoint, dtype):
            put_parameter(part.module, target, tensor)


def converted(
    part: Part,
    checkpoint: Checkpoint,
    dtype: torch.dtype | Callable[[str, torch.dtype], torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Yield a part's parameters by name, one at a time, in the order of its pieces.

    dtype: one, or a function (name, dtype that stores its tensors exactly). Raises CheckpointError.
    """
    parameters = dict(part.module.named_parameters())
    with checkpoint.reader() as reader:
        for target, pieces in part.pieces:
            kept = dtype
            if not isinstance(kept, torch.dtype):
                stored = (reader.dtype(piece.name) for piece in pieces)
                kept = kept(target, reduce(torch.promote_types, stored))
            tensor = torch.empty(parameters[target].shape, dtype=kept)
            for piece in pieces:
                copy_piece(tensor, piece, reader.tensor(piece.name))
            reader.trim()
            yield target, tensor


def copy_piece(parameter: Tensor, piece: Piece, stored: Tensor) -> None:
    """Convert a stored tensor and copy it to its region. Raises CheckpointError, also for NaN."""
    region, stored = fitting(parameter, piece, stored)
    region.copy_(stored)
    check_finite(region, piece.name)


def fitting(parameter: Tensor, piece: Piece, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the region of a parameter that a piece fills, and the converted tensor.

    Raises CheckpointError if their shapes differ.
    """
    region = parameter[piece.region]
    if piece.convert is not None:
        stored = piece.convert(stored)
    # A norm's weight [head_dim] is copied to every head [heads, head_dim]; other shapes are equal.
    if region.shape[-stored.ndim :] != stored.shape:
        raise CheckpointError(
            f"{piece.name} has shape {list(stored.shape)}; config.json requires "
            f"{list(region.shape[-stored.ndim :])}. They belong to different checkpoints: download "
            "both again."
        )
    return region, stored


def check_names(parts: Sequence[Part], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for missing names, and unexpected ones with the parts' prefixes."""
    stored = set(checkpoint.names)
    wanted = {p.name for part in parts for _, pieces in part.pieces for p in pieces}
    owned = tuple(prefix for part in parts for prefix in part.prefixes)
    compare_names(wanted, {n for n in stored if n.startswith(owned)}, stored)


def compare_names(wanted: set[str], owned: set[str], stored: set[str]) -> None:
    """Raise CheckpointError that lists missing and unexpected names.

    wanted: must all be stored. owned: stored names that must all be wanted.
    """
    problems = []
    for problem, names in (
        ("lacks", sorted(wanted - stored)),
        ("has unknown", sorted(owned - wanted)),
    ):
        if names:
            more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
            problems.append(
                f"{problem} {len(names)} parameters: {', '.join(names[:LISTED_NAMES])}{more}"
            )
    if problems:
        raise CheckpointError(
            f"The checkpoint {'; it '.join(problems)}. Its config.json and its shards don't "
            "belong together, or a shard is missing."
        )


def put_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a module's parameter by dotted name, without a copy."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
