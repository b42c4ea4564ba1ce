"""A toolchain without a compiler.

Weights are written and sharded as for Neuron; the graphs of a loaded part run as modules on the
CPU, one thread for each rank, over a state that each rank keeps.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.neuron.nxdi.spec import DecoderSpec, DecoderWeights
from qwen3_omni_neuron.neuron.part.compiler_flags import compiler_flags
from qwen3_omni_neuron.neuron.part.device_types import device_type
from qwen3_omni_neuron.neuron.part.part import CheckedPart
from qwen3_omni_neuron.neuron.part.shards import read_shard, write_shards
from qwen3_omni_neuron.neuron.part.spec import PartSpec
from qwen3_omni_neuron.neuron.part.traced import TracedGraph, TracedPart, state_name
from qwen3_omni_neuron.neuron.part_files import WEIGHTS_FOLDER
from testing.eager_neuron import EagerDecoder, eager_decoder
from testing.rank_threads import Ranks

DESCRIPTION = "graphs.json"
States = dict[str, Tensor]


class SimulatedToolchain:
    """A Toolchain that runs on the CPU."""

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        write_shards(spec, checkpoint, folder)
        flags = {g.label: compiler_flags(g, spec.lnc, spec.profile) for g in spec.graphs}
        (folder / DESCRIPTION).write_text(json.dumps(flags))

    def load_part(self, spec: PartSpec, folder: Path) -> CheckedPart:
        compiled = json.loads((folder / DESCRIPTION).read_text())
        if strange := compiled.keys() ^ {graph.label for graph in spec.graphs}:
            raise ArtifactError(f"{folder} and this version's graphs differ in {sorted(strange)}.")
        return CheckedPart(spec, SimulatedCores(spec, folder).run)

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the ranks' weights alone."""
        weights = DecoderWeights.of(spec.part, checkpoint, spec.config)
        weights.write_shards(folder, spec.plan, spec.takes_rows)

    def load_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> EagerDecoder:
        """Load our own module over the checkpoint's weights: only NxDI can join NxDI's shards."""
        assert len(list((folder / WEIGHTS_FOLDER).iterdir())) == spec.plan.tp
        return eager_decoder(spec.part, spec.config, spec.compiled)


class SimulatedCores:
    """The cores of a part. states: one for each, zeros at first."""

    def __init__(self, spec: PartSpec, folder: Path):
        self._ranks = Ranks(spec.tp)
        self._parts = [TracedPart(spec, self._ranks.rank(rank)) for rank in range(spec.tp)]
        for rank, part in enumerate(self._parts):
            part.load(read_shard(folder, rank, part.weights))
        self.states = [zero_state(spec) for _ in range(spec.tp)]

    def run(self, label: str, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Run a graph on all ranks; return rank 0's outputs, as NxD does."""
        calls = [
            partial(run_with_state, part.graphs[label], states, inputs)
            for part, states in zip(self._parts, self.states, strict=True)
        ]
        return self._ranks.run(calls)[0]


def zero_state(spec: PartSpec) -> States:
    return {
        state_name(kept): torch.zeros(kept.lengths, dtype=device_type(kept.dtype))
        for kept in spec.state
    }


def run_with_state(
    module: TracedGraph, states: States, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Call a traced graph over a rank's state and replace that state, as a core does."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    for name in names:
        setattr(module, name, states[name])
    versions = {name: states[name]._version for name in names}
    outputs = module(**inputs)
    for name in names:
        left = getattr(module, name)
        kept = states[name]
        assert kept._version == versions[name], f"{name} was written to in place"
        assert (left.shape, left.dtype) == (kept.shape, kept.dtype), name
        states[name] = left
    return outputs
