"""What compiles parts of the model and loads them: NxD on a Neuron host, a stand-in in tests."""

from pathlib import Path
from typing import Protocol

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.neuron.part import LoadedPart
from qwen3_omni_neuron.neuron.part_spec import PartSpec


class Toolchain(Protocol):
    """Compiles a part into a folder of its own, and loads it from there."""

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the part's graphs and weights into `folder`, which is there and empty.

        Raises CheckpointError, CompileError that names what failed, OSError.
        """
        ...

    def load_part(self, spec: PartSpec, folder: Path) -> LoadedPart:
        """Load what was compiled from this very spec, onto the cores that this process has.

        Raises ArtifactError for a folder that does not fit the spec.
        """
        ...
