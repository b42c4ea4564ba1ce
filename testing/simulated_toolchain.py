"""A toolchain without a compiler.

Weights are cut and written as for Neuron. The graphs of a loaded part run as modules on the CPU, in
a thread for each rank, over a state that stays with its rank.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import write_decoder_shards
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import (
    NxdToolchain,
    TracedGraph,
    TracedPart,
    compiler_flags,
    state_name,
)
from qwen3_omni_neuron.neuron.part import WEIGHTS_FOLDER, LoadedPart, PartSpec, device_type
from qwen3_omni_neuron.neuron.shards import read_part_shard, write_part_shards
from testing.eager_neuron import EagerDecoder, eager_decoder
from testing.rank_threads import Ranks

DESCRIPTION = "graphs.json"  # a part's labels, or a decoder's checkpoint
States = dict[str, Tensor]


class SimulatedToolchain(NxdToolchain):
    """A toolchain without a compiler and without a device."""

    def __init__(self) -> None:
        pass  # it needs no SDK

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        write_part_shards(spec, checkpoint, folder)
        flags = {g.label: compiler_flags(g, spec.lnc) for g in spec.graphs}
        (folder / DESCRIPTION).write_text(json.dumps(flags))

    def load_part(self, spec: PartSpec, folder: Path) -> LoadedPart:
        compiled = json.loads((folder / DESCRIPTION).read_text())
        if different := compiled.keys() ^ {graph.label for graph in spec.graphs}:
            raise ArtifactError(
                f"{folder} and this version's graphs differ in {sorted(different)}."
            )
        return LoadedPart(spec.graphs, SimulatedCores(spec, folder).run)

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the cores' weights, and no graphs."""
        write_decoder_shards(spec, checkpoint, folder)
        (folder / DESCRIPTION).write_text(json.dumps(str(checkpoint.folder)))

    def load_decoder(self, spec: DecoderSpec, folder: Path) -> EagerDecoder:
        """Run our own module over the checkpoint's weights: only NxDI can join the cores' files."""
        assert len(list((folder / WEIGHTS_FOLDER).iterdir())) == spec.tp
        return eager_decoder(spec, Path(json.loads((folder / DESCRIPTION).read_text())))


class SimulatedCores:
    """The cores of one part, a thread each. states: each core's state, zeros at first."""

    def __init__(self, spec: PartSpec, folder: Path):
        self._ranks = Ranks(spec.tp)
        self._parts = [TracedPart(spec, self._ranks.rank(rank)) for rank in range(spec.tp)]
        for rank, part in enumerate(self._parts):
            part.load(read_part_shard(folder, rank, part.weights))
        self.states = [zero_state(spec) for _ in range(spec.tp)]

    def run(self, label: str, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Return rank 0's outputs, as NxD does."""
        calls = [
            partial(run_with_state, part.graphs[label], states, inputs)
            for part, states in zip(self._parts, self.states, strict=True)
        ]
        return self._ranks.run(calls)[0]


def zero_state(spec: PartSpec) -> States:
    return {
        state_name(kept): torch.zeros(kept.shape, dtype=device_type(kept.dtype))
        for kept in spec.state
    }


def run_with_state(
    module: TracedGraph, states: States, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Call a traced graph over a rank's state, and renew the state, as a core does."""
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
