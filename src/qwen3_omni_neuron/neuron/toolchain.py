"""What compiles parts of the model and loads them: NxD on a Neuron host, a stand-in in tests."""

from pathlib import Path
from typing import Protocol

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs
from qwen3_omni_neuron.neuron.nxdi.spec import DecoderSpec
from qwen3_omni_neuron.neuron.part.part import LoadedPart
from qwen3_omni_neuron.neuron.part.spec import PartSpec


class Toolchain(Protocol):
    """Compiles parts into a folder each, which is there and empty, and loads them from there, onto
    the cores that this process has."""

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the part's graphs and weights into `folder`.

        Raises CheckpointError, CompileError that names what failed, OSError.
        """
        ...

    def load_part(self, spec: PartSpec, folder: Path) -> LoadedPart:
        """Load what was compiled from this very spec.

        Raises ArtifactError for a folder that does not fit the spec.
        """
        ...

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """As compile_part."""
        ...

    def load_decoder(
        self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path
    ) -> DecoderGraphs:
        """As load_part. checkpoint: where the weights were cut from; nothing is read of it."""
        ...
