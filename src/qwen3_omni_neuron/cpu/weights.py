"""Write and load the weights of a compiled tree: one file a graph, of our modules' parameters.

They are converted when they are written. A loaded file is mapped into memory, without a copy: pages
are read from the disk when they are first used, and all processes of one tree share them.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.checkpoint.parameters import Part, check_names, converted, put_parameter
from qwen3_omni_neuron.checkpoint.tensor_file import write_tensors
from qwen3_omni_neuron.compilation.manifest import GraphRecord, record_files
from qwen3_omni_neuron.compilation.plan import GRAPH_PARTS, GRAPH_STAGES, CompilePlan
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.graphs.all import graph_calls
from qwen3_omni_neuron.model.config import OmniConfig

WEIGHTS_FILE = "weights.safetensors"


def load_compiled_models(
    tree: Path, config: OmniConfig, dtype: torch.dtype, stages: Collection[str]
) -> Models:
    """Load the modules of some stages from a tree.

    The talker also gets the token embedding, from the thinker's file, for its text rows.
    Raises ArtifactError for a file that can't be read, or whose tensors are not the modules'.
    """
    models, parts = lay_out(config, stages)
    for graph, names in GRAPH_PARTS.items():
        modules = {name: parts[name].module for name in names if name in parts}
        if modules:
            with _open_weights(tree / graph) as file:
                wanted = {
                    f"{name}.{target}": (name, target)
                    for name in modules
                    for target, _ in parts[name].pieces
                }
                _fill(tree / graph, file, wanted, modules, dtype, whole=True)
    if "embedding" in parts:
        wanted = {"thinker.embedding.weight": ("embedding", "weight")}
        with _open_weights(tree / "thinker") as file:
            modules = {"embedding": parts["embedding"].module}
            _fill(tree / "thinker", file, wanted, modules, dtype, whole=False)
    return models


@contextmanager
def _open_weights(folder: Path) -> Iterator[Any]:
    """Open the weights in a graph's folder."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} can't be read ({error}). Delete {folder} and compile again: "
            "only that graph is compiled."
        ) from error


def _fill(
    folder: Path,
    file: Any,
    wanted: dict[str, tuple[str, str]],
    modules: dict[str, nn.Module],
    dtype: torch.dtype,
    whole: bool,
) -> None:
    """Make tensors of a file the parameters of modules.

    wanted: module and parameter name of each tensor. whole: the file must have no other tensors.
    """
    stored = set(file.keys())
    different = sorted(wanted.keys() - stored) or (sorted(stored - wanted.keys()) if whole else [])
    if different:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} does not have the tensors of this version's modules "
            f"({len(different)} differ, {different[0]} first). Delete {folder} and compile again."
        )
    for name, (module, target) in wanted.items():
        tensor = file.get_tensor(name)
        shape = modules[module].get_parameter(target).shape
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ArtifactError(
                f"{name} in {folder / WEIGHTS_FILE} is {tensor.dtype} {list(tensor.shape)}, and "
                f"{dtype} {list(shape)} was expected. Delete {folder} and compile again."
            )
        put_parameter(modules[module], target, tensor)


def compile_graph(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Write a graph's weights into `folder`, one parameter at a time.

    Raises OSError, and CheckpointError (see checkpoint.parameters.load_parts), also for parameters
    of the other graphs of its stage.
    """
    started = time.monotonic()
    config, dtype = read_config(plan.model), getattr(torch, plan.dtype)
    checkpoint = Checkpoint(plan.model)
    parts = _stage_parts(plan, graph)
    check_names(list(parts.values()), checkpoint)
    chosen = {name: parts[name] for name in GRAPH_PARTS[graph]}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, part in chosen.items():
            for target, tensor in converted(part, checkpoint, dtype):
                yield f"{name}.{target}", tensor

    write_tensors(folder / WEIGHTS_FILE, _shapes(chosen), dtype, tensors())
    calls, files = graph_calls(config, plan, graph), record_files(folder)
    return GraphRecord(calls, files, round(time.monotonic() - started, 3))


def expected_bytes(plan: CompilePlan, graph: str) -> int:
    """Return the size in bytes of a graph's weights in the plan's dtype."""
    parts = _stage_parts(plan, graph)
    shapes = _shapes({name: parts[name] for name in GRAPH_PARTS[graph]})
    return sum(shape.numel() for shape in shapes.values()) * getattr(torch, plan.dtype).itemsize


def _stage_parts(plan: CompilePlan, graph: str) -> dict[str, Part]:
    """Return all parts of a graph's stage."""
    return lay_out(read_config(plan.model), (GRAPH_STAGES[graph],))[1]


def _shapes(parts: dict[str, Part]) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a graph's file by name."""
    return {
        f"{name}.{target}": part.module.get_parameter(target).shape
        for name, part in parts.items()
        for target, _ in part.pieces
    }
