"""The interface between the engines and the Neuron compiler and runtime.

`neuron.nxdi.nxd_toolchain.NxdToolchain` is the implementation on a Neuron host. Tests replace it,
and nothing else, to run the engines without a device.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.inputs import Inputs
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec

Outputs = tuple[Tensor, Tensor]
"""Logits [B, vocab] and the captured hidden states [B, rows, hidden] of one call."""


class DecoderGraphs(Protocol):
    """The graphs of one decoder on its cores, with its weights and its KV cache.

    Returned by Toolchain.load_decoder. The inputs are those of neuron.nxdi.inputs.
    """

    spec: DecoderSpec

    def prefill(self, inputs: Inputs) -> Outputs:
        """Run one prompt, and write its keys and values. Returns the logits of its last row."""
        ...

    def decode(self, inputs: Inputs) -> Outputs:
        """Run one row for each of several slots.

        inputs: as many rows as one of the spec's batches has; a row may be IDLE. In the graph of
        all slots, row i is slot i or IDLE.
        """
        ...

    def close(self) -> None:
        """Release graphs, weights and KV cache."""
        ...


class Toolchain(Protocol):
    """Compiles each part and each decoder into a folder of its own, and loads it from there.

    A folder to compile into exists and is empty. Loading puts graphs and weights on the cores that
    this process has, and calls no graph.
    """

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a part's graphs and weights.

        Raises CheckpointError, CompileError that names what failed, OSError.
        """
        ...

    def load_part(self, spec: PartSpec, folder: Path) -> LoadedPart:
        """Load a part that was compiled from this very spec.

        Raises ArtifactError for a folder that does not fit the spec.
        """
        ...

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a decoder's graphs and weights. Raises what compile_part raises."""
        ...

    def load_decoder(self, spec: DecoderSpec, folder: Path) -> DecoderGraphs:
        """Load a decoder that was compiled from this very spec. Raises what load_part raises."""
        ...
