"""The thinker layer by layer, over engines of its first layers alone.

An engine returns the hidden states of one layer, the accept layer. So for each layer that is looked
at, a checkpoint is written whose accept layer it is and whose thinker ends one layer above, and it
is loaded, or compiled and loaded, as the model was. The graphs that serve need no further output,
and all targets are looked at in the same way.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint, tensor_files
from qwen3_omni_neuron.checkpoint.headers import INDEX_FILE
from qwen3_omni_neuron.checkpoint.modules import load_tables
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.loading import find_target
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.verification.judgement import Difference
from qwen3_omni_neuron.verification.reference import Arrays
from qwen3_omni_neuron.verification.stages import EngineStages

LOOKED_AT = 8
"""Most layers that are looked at where nothing is searched for."""
_LAYER = re.compile(r"(thinker|talker)\.model\.layers\.(\d+)\.")

States = list[NDArray[np.float32]]
"""Hidden states of each question's prompt, [rows, hidden]."""


@dataclass(frozen=True)
class ByLayer:
    """Layers of the thinker that were looked at, in their order.

    first: the first that differs from the reference, "" where none was searched for.
    """

    differences: list[Difference]
    first: str = ""


def find_first(differs_at: int, layers: int, look: Callable[[int], Difference]) -> ByLayer:
    """Search for the first layer that differs, by halves.

    differs_at: number of layers after which the model is known to differ; all later ones differ,
    too. layers: number of all. look: compares after a number of layers; 0: the layers' input.
    """
    found: dict[int, Difference] = {}
    holds, differs = -1, differs_at
    while differs - holds > 1:
        layer = (holds + differs) // 2
        found[layer] = look(layer)
        holds, differs = (layer, differs) if found[layer].holds else (holds, layer)
    first = f"thinker's layer {differs}"
    if differs == layers:  # it is known by the logits alone
        first += ", the last norm, lm_head or the lookup of embeddings"
    differences = [found[layer] for layer in sorted(found)]
    return ByLayer(differences, found[differs].stage if differs in found else first)


def some_layers(layers: int) -> list[int]:
    """Return layers that can be looked at, evenly spaced."""
    last = layers - 1
    return np.unique(np.linspace(1, last, min(last, LOOKED_AT)).astype(int)).tolist()


class Layers:
    """Hidden states of a thinker's layers over the rows of prompts.

    plan: the model's plan. prompts: at least one. given: the reference's results for each prompt,
    or None. open_engines: loads the checkpoint in a folder as the model was loaded, and may write
    beside that folder. near: where the folders are made; None: where temporary files are.
    """

    def __init__(
        self,
        plan: CompilePlan,
        prompts: Sequence[Prompt],
        given: Sequence[Arrays | None],
        open_engines: Callable[[Path], AbstractContextManager[Engines]],
        near: Path | None = None,
    ):
        self._model, self._config = plan.model, read_config(plan.model)
        self._open, self._near = open_engines, near
        dtype = getattr(torch, plan.arithmetic)
        table = load_tables(Checkpoint(plan.model), self._config, dtype).embedding
        assert table is not None
        self._asked = [
            (prompt, table.weight[prompt.token_ids].detach(), arrays)
            for prompt, arrays in zip(prompts, given, strict=True)
        ]

    def states(self, layer: int) -> States:
        """Return the rows after a number of layers. 0: those of the tokens, before the first.

        layer: below the number of all layers. Raises CheckpointError, and what open_engines raises.
        """
        if not layer:
            return [self._embedded(*one) for one in self._asked]
        with TemporaryDirectory(dir=self._near) as made:
            folder = write_first_layers(self._model, layer, Path(made) / "checkpoint")
            with self._open(folder) as engines:
                stages = EngineStages(engines, self._config)
                return [stages.accepted_rows(*one) for one in self._asked]

    def _embedded(self, prompt: Prompt, rows: Tensor, given: Arrays | None) -> NDArray[np.float32]:
        """Return the embeddings of a prompt's tokens, with the reference's rows of media."""
        embedded, ids = rows.float().numpy().copy(), prompt.token_ids.numpy()
        if given is not None:
            audio = ids == self._config.thinker.audio_token_id
            visual = np.isin(ids, self._config.thinker.media_token_ids) & ~audio
            embedded[audio], embedded[visual] = given["audio"], given["vision"][0]
        return embedded


@contextmanager
def load_first_layers(
    plan: CompilePlan, load: Mapping[str, Any], rows: int, folder: Path
) -> Iterator[Engines]:
    """Load a checkpoint of a model's first layers, after compiling it where the model was compiled.

    plan, load: the model's plan, and the arguments of Qwen3Omni.load. rows: most rows of a prompt.
    folder: the checkpoint's folder; the tree is made beside it.
    Raises the errors of Qwen3Omni.load and compile_tree.
    """
    load, built = {**load, "target": plan.target, "dtype": plan.dtype}, list[Engines]()
    if load.get("compiled_path") is not None:
        tree = folder.parent / "compiled"
        compile_tree(_smaller(replace(plan, model=folder), rows), tree, find_target(plan.target))
        load |= {"compiled_path": tree, "max_concurrency": None, "context_length": None}

    def keep(engines: Engines) -> Engines:
        built.append(engines)
        return engines

    with Qwen3Omni.load(folder, **load, reuse=False, wrap_engines=keep):
        yield built[0]


def write_first_layers(model: Path, layer: int, folder: Path) -> Path:
    """Write a checkpoint that hands out the hidden states after a layer of the thinker.

    The thinker ends one layer above, or above the layers to which deepstack is added; the talker
    has one layer. Its files are links to the model's, an index leaves out the other layers.
    Returns the new folder. Raises CheckpointError.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    thinker, talker = config["thinker_config"], config["talker_config"]
    deepstack = len(thinker["vision_config"]["deepstack_visual_indexes"])
    text = thinker["text_config"]
    text["num_hidden_layers"] = min(text["num_hidden_layers"], max(layer, deepstack) + 1)
    talker["text_config"]["num_hidden_layers"] = 1
    talker["accept_hidden_layer"] = layer
    layers = {"thinker": text["num_hidden_layers"], "talker": 1}
    files = {
        name: file
        for name, file in tensor_files(model).items()
        if (found := _LAYER.match(name)) is None or int(found[2]) < layers[found[1]]
    }
    folder.mkdir()
    for path in model.resolve().iterdir():
        if path.name not in ("config.json", INDEX_FILE):
            (folder / path.name).symlink_to(path)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return folder


def _smaller(plan: CompilePlan, rows: int) -> CompilePlan:
    """Return the plan with one slot, and of its buckets those that prompts of `rows` use."""
    if not plan.is_static:
        return replace(plan, max_concurrency=1)
    longest = plan.decode_buckets if plan.chunked_prefill else plan.prompt_buckets
    length = bucket_of(rows, longest, "prompt rows")
    return replace(
        plan,
        max_concurrency=1,
        batches=(1,),
        context_length=length,
        prompt_buckets=tuple(sorted({min(size, length) for size in plan.prompt_buckets})),
        decode_buckets=(length,),
    )
