"""What loads the graphs of a compiled tree, whatever has compiled them."""

from typing import Protocol

from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs
from qwen3_omni_neuron.neuron.part.part import LoadedPart


class Loader(Protocol):
    """Loads onto the cores that its process sees."""

    def load_part(self, name: str) -> LoadedPart:
        """A part by its name in graphs.all.PARTS, other than the decoders. Raises ArtifactError."""
        ...

    def load_decoder(self, name: str) -> DecoderGraphs:
        """name: "thinker" or "talker". Raises ArtifactError."""
        ...
