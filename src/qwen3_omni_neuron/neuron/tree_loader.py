"""Loads the parts of a compiled tree."""

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import GRAPH_OF_PART
from qwen3_omni_neuron.neuron.load import NeuronSpec
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs
from qwen3_omni_neuron.neuron.nxdi.spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.part.part import LoadedPart
from qwen3_omni_neuron.neuron.part.spec import part_spec
from qwen3_omni_neuron.neuron.toolchain import Toolchain


class TreeLoader:
    """Serves neuron.loader.Loader."""

    def __init__(self, spec: NeuronSpec, toolchain: Toolchain | None = None):
        """spec: of a compiled tree, which was opened (see compiled_tree)."""
        assert spec.engine.compiled is not None, "there is a tree to load from"
        self._spec, self._tree = spec.engine, spec.engine.compiled
        self._toolchain = toolchain or NxdToolchain()

    def load_part(self, name: str) -> LoadedPart:
        spec = part_spec(self._spec.config, self._spec.plan, name)
        return self._toolchain.load_part(spec, self._tree / GRAPH_OF_PART[name] / name)

    def load_decoder(self, name: str) -> DecoderGraphs:
        spec = DecoderSpec(name, self._spec.config, self._spec.plan)
        folder = self._tree / GRAPH_OF_PART[name] / name
        return self._toolchain.load_decoder(spec, Checkpoint(self._spec.plan.model), folder)
