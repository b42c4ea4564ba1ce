"""What a part of the model is compiled from for Neuron."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.graphs.all import static_config
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.loading import lay_out
from qwen3_omni_neuron.model.norm import RmsNorm
from qwen3_omni_neuron.neuron.compiler_flags import PROFILES
from qwen3_omni_neuron.weights import Part, codec_embedding_pieces

# The parts that are traced from the modules of model/; thinker and talker are not among them.
PART_STAGES = {
    "audio_encoder": "thinker",
    "vision_encoder": "thinker",
    "text_projection": "talker",
    "hidden_projection": "talker",
    "code_predictor": "talker",
    "code2wav": "vocoder",
}


@dataclass(frozen=True)
class PartSpec:
    """One part with its graphs, which share its weights and its state.

    graphs: as one of the cores runs them (graphs.all.all_graphs with this tp). All that keep a
    state keep the same one. tp: cores that share the weights. lnc: physical cores a logical one.
    profile: one of compiler_flags.PROFILES. dtype: of the weights. make: lays the plain module
    out anew, its parameters on the meta device, its buffers, which are constants, as they are.
    weights: the pieces of every parameter of it.
    """

    name: str
    graphs: tuple[Graph, ...]
    tp: int
    lnc: int
    profile: str
    dtype: torch.dtype
    make: Callable[[], nn.Module]
    weights: Part

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise OptionError(f"profile is one of {', '.join(PROFILES)}, got {self.profile!r}.")
        for name in ("tp", "lnc"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is 1 or more, got {getattr(self, name)}.")
        labels = [graph.label for graph in self.graphs]
        assert labels, f"{self.name} has no graph"
        assert len(labels) == len(set(labels)), labels
        assert {graph.part for graph in self.graphs} == {self.name}, labels
        assert len({graph.state for graph in self.graphs if graph.state}) < 2, (
            f"graphs of {self.name} share one state, and keep several"
        )

    @property
    def state(self) -> tuple[TensorSpec, ...]:
        """What every graph that keeps a state keeps, at each core."""
        return next((graph.state for graph in self.graphs if graph.state), ())


def part_spec(
    config: OmniConfig,
    name: str,
    graphs: Sequence[Graph],
    dtype: torch.dtype,
    tp: int = 1,
    lnc: int = 1,
    profile: str = "safe",
) -> PartSpec:
    """The spec of one of PART_STAGES. graphs: those of this part, and of others, which are left
    out. Raises OptionError."""

    def make() -> nn.Module:
        return _laid_out(config, name, dtype)[0]

    own = tuple(graph for graph in graphs if graph.part == name)
    module, weights = _laid_out(config, name, dtype)
    if name == "code_predictor":  # the talker's table, which lies on the same cores twice
        (_, pieces), *_ = codec_embedding_pieces()
        whole = [*weights.pieces, ("code0_embedding.weight", pieces)]
        weights = replace(weights, pieces=whole)
    missing = dict(module.named_parameters()).keys() ^ dict(weights.pieces).keys()
    assert not missing, f"{name}: parameters and pieces differ in {sorted(missing)}"
    return PartSpec(name, own, tp, lnc, profile, dtype, make, weights)


def _laid_out(config: OmniConfig, name: str, dtype: torch.dtype) -> tuple[nn.Module, Part]:
    models, parts = lay_out(static_config(config), (PART_STAGES[name],))
    module: nn.Module = getattr(models, name)
    for layer in module.modules():
        if isinstance(layer, RmsNorm):
            layer.spelled_out = True
    for parameter in module.parameters():
        # Not Module.to, which would round the constants, too.
        parameter.data = parameter.data.to(dtype)
    return module, parts[name]
