"""The weights of a compiled tree: our modules' own parameters, a file a graph, mapped into memory.

Nothing is converted or copied when they are read: pages come from the disk as they are first used,
and processes over the same tree share them.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.loading import Models, lay_out
from qwen3_omni_neuron.plan import GRAPH_PARTS
from qwen3_omni_neuron.weights import put_parameter

WEIGHTS_FILE = "weights.safetensors"


def load_compiled_models(
    tree: Path, config: OmniConfig, dtype: torch.dtype, stages: Collection[str]
) -> Models:
    """The modules of some stages over the weights in a tree.

    The talker's text rows are made from the token embedding, which lies with the thinker.
    Raises ArtifactError for a file that can't be read, or whose tensors are not the modules'.
    """
    models, parts = lay_out(config, stages)
    for graph, names in GRAPH_PARTS.items():
        modules = {name: parts[name].module for name in names if name in parts}
        if modules:
            with _weights(tree / graph) as file:
                wanted = {
                    f"{name}.{target}": (name, target)
                    for name in modules
                    for target, _ in parts[name].pieces
                }
                _fill(tree / graph, file, wanted, modules, dtype, whole=True)
    if "embedding" in parts:
        wanted = {"thinker.embedding.weight": ("embedding", "weight")}
        with _weights(tree / "thinker") as file:
            modules = {"embedding": parts["embedding"].module}
            _fill(tree / "thinker", file, wanted, modules, dtype, whole=False)
    return models


@contextmanager
def _weights(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} can't be read ({error}). Delete {folder} and compile again: "
            "only it will be."
        ) from error


def _fill(
    folder: Path,
    file: Any,
    wanted: dict[str, tuple[str, str]],
    modules: dict[str, nn.Module],
    dtype: torch.dtype,
    whole: bool,
) -> None:
    """whole: the file has no other tensors than those that are wanted."""
    stored = set(file.keys())
    strange = sorted(wanted.keys() - stored) or (sorted(stored - wanted.keys()) if whole else [])
    if strange:
        raise ArtifactError(
            f"{folder / WEIGHTS_FILE} does not have the tensors of this version's modules "
            f"({len(strange)} differ, {strange[0]} first). Delete {folder} and compile again."
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
