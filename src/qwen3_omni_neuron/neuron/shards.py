"""A part's weights sharded over ranks, and their files."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import fill
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.checkpoint.parameters import compare_names, converted
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, layout_bytes, write_tensor_files
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.neuron.graphs.cut import Cut, shard
from qwen3_omni_neuron.neuron.graphs.layers import Alone, Group
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.part import WEIGHTS_FOLDER, PartSpec, rank_file, to_device_type

_OWNER = "owner"  # first part of names in the files: the module in the traced module


class PartShare:
    """One rank's share of a part: its module with parallel layers."""

    def __init__(self, spec: PartSpec, group: Group):
        owner = spec.make().eval()
        self.cuts: Mapping[str, Cut] = parallelize(owner, spec.tp, group)
        """Each parameter's sharding, by its name in the plain module."""
        fill(owner, [(name, to_device_type(buffer)) for name, buffer in owner.named_buffers()])
        self.owner = owner

    @property
    def weights(self) -> Layout:
        """Shape and dtype of every tensor in a rank's file."""
        tensors = (*self.owner.named_parameters(), *self.owner.named_buffers())
        return {weight_name(name): (tuple(t.shape), t.dtype) for name, t in tensors}

    @property
    def constants(self) -> dict[str, Tensor]:
        """The owner's buffers, by name."""
        return dict(self.owner.named_buffers())

    def allocate(self) -> None:
        """Allocate the parameters, uninitialised."""
        parameters = list(self.owner.named_parameters())
        fill(self.owner, ((name, torch.empty_like(t, device="cpu")) for name, t in parameters))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Set every tensor from a rank's file."""
        owned = {name.removeprefix(f"{_OWNER}."): tensor for name, tensor in weights.items()}
        fill(self.owner, owned.items())


def weight_name(name: str) -> str:
    """Return a parameter's or constant's name in a file."""
    return f"{_OWNER}.{name}"


def write_part_shards(spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
    """Write every rank's weights, one parameter in memory at a time.

    Raises CheckpointError, OSError.
    """
    stored = set(checkpoint.names)
    compare_names({p.name for _, pieces in spec.weights.pieces for p in pieces}, set(), stored)
    part = PartShare(spec, Alone())
    (folder / WEIGHTS_FOLDER).mkdir()
    int8 = {name for name, p in part.owner.named_parameters() if p.dtype == torch.int8}
    names = [(name, name + SCALE) if name in int8 else (name,) for name, _ in spec.weights.pieces]
    in_order = [*chain.from_iterable(names), *part.constants]
    weights = part.weights
    layout = {name: weights[name] for name in map(weight_name, in_order)}

    def shards() -> Iterator[tuple[str, list[Tensor]]]:
        for name, tensor in chain(_parameters(spec, checkpoint, int8), part.constants.items()):
            cut = part.cuts.get(name)
            yield weight_name(name), [shard(tensor, cut, rank) for rank in range(spec.tp)]

    write_tensor_files([folder / rank_file(rank) for rank in range(spec.tp)], layout, shards())


def _parameters(
    spec: PartSpec, checkpoint: Checkpoint, int8: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in converted(spec.weights, checkpoint, spec.dtype):
        if name in int8:
            yield from zip((name, name + SCALE), quantise(tensor), strict=True)
        else:
            yield name, tensor


def read_part_shard(folder: Path, rank: int, layout: Layout) -> dict[str, Tensor]:
    """Map a rank's weights into memory. Raises ArtifactError if they don't fit `layout`."""
    path = folder / rank_file(rank)
    again = f"Delete {folder} and compile again, which skips the rest."
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} can't be read ({error}). {again}") from error
    if different := sorted(tensors.keys() ^ layout.keys()):
        raise ArtifactError(
            f"{path} does not have the tensors of this version's module ({len(different)} differ, "
            f"{different[0]} first). {again}"
        )
    for name, (shape, dtype) in layout.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ArtifactError(
                f"{name} in {path} is {tensor.dtype} {list(tensor.shape)}, and {dtype} "
                f"{list(shape)} was expected. {again}"
            )
    return tensors


def part_shard_bytes(spec: PartSpec) -> int:
    """Return the bytes of all ranks' files."""
    return spec.tp * layout_bytes(PartShare(spec, Alone()).weights)
