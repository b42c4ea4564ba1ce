"""A part's weights: a file for each rank, with the names that NxD gives to the tensors."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.parameters import compare_names, converted
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, layout_bytes, write_tensor_files
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.graphs.parallel.cut import shard
from qwen3_omni_neuron.graphs.parallel.layers import Alone
from qwen3_omni_neuron.neuron.nxdi.traced import TracedPart, weight_name
from qwen3_omni_neuron.neuron.part import PartSpec
from qwen3_omni_neuron.neuron.part_files import WEIGHTS_FOLDER, rank_file


def write_part_shards(spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the weights of every rank into a part's folder, which has none yet.

    Memory: one parameter, its stored tensors and the ranks' shares of it.
    Raises CheckpointError where the checkpoint lacks a tensor or has it in another shape, OSError.
    """
    stored = set(checkpoint.names)
    compare_names({p.name for _, pieces in spec.weights.pieces for p in pieces}, set(), stored)
    part = TracedPart(spec, Alone())
    (folder / WEIGHTS_FOLDER).mkdir()
    in_order = [*(name for name, _ in spec.weights.pieces), *part.constants]
    layout = {weight_name(name): part.weights[weight_name(name)] for name in in_order}

    def shards() -> Iterator[tuple[str, list[Tensor]]]:
        whole = converted(spec.weights, checkpoint, spec.dtype)
        for name, tensor in chain(whole, part.constants.items()):
            cut = part.cuts.get(name)
            yield weight_name(name), [shard(tensor, cut, rank) for rank in range(spec.tp)]

    write_tensor_files([folder / rank_file(rank) for rank in range(spec.tp)], layout, shards())


def read_part_shard(folder: Path, rank: int, wanted: Layout) -> dict[str, Tensor]:
    """Map a rank's weights into memory. wanted: TracedPart.weights.

    Raises ArtifactError where the file can't be read or has other tensors.
    """
    path = folder / rank_file(rank)
    again = f"Delete {folder} and compile again: only it will be."
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} can't be read ({error}). {again}") from error
    if different := sorted(tensors.keys() ^ wanted.keys()):
        raise ArtifactError(
            f"{path} does not have the tensors of this version's module ({len(different)} differ, "
            f"{different[0]} first). {again}"
        )
    for name, (shape, dtype) in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ArtifactError(
                f"{name} in {path} is {tensor.dtype} {list(tensor.shape)}, and {dtype} "
                f"{list(shape)} was expected. {again}"
            )
    return tensors


def part_shard_bytes(spec: PartSpec) -> int:
    """Return the size in bytes of all ranks' files, without headers."""
    return spec.tp * layout_bytes(TracedPart(spec, Alone()).weights)
