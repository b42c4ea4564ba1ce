"""What a part of the model is compiled from for Neuron."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.names import codec_embedding_pieces
from qwen3_omni_neuron.checkpoint.parameters import Part
from qwen3_omni_neuron.compilation.plan import GRAPH_OF_PART, GRAPH_STAGES, CompilePlan
from qwen3_omni_neuron.graphs.all import all_graphs, spell_out_norms, static_config
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.model.config import OmniConfig


@dataclass(frozen=True)
class PartSpec:
    """One part with its graphs, which share its weights and its state.

    graphs: as one of the cores runs them (graphs.all.all_graphs with this tp). All that keep a
    state keep the same one. tp: cores that share the weights. lnc: physical cores a logical one.
    profile: see compiler_flags. dtype: of the weights. make: lays the plain module
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


def part_spec(config: OmniConfig, plan: CompilePlan, name: str) -> PartSpec:
    """The spec of a part that is none of decoders.DECODERS."""
    dtype = getattr(torch, plan.dtype)

    def make() -> nn.Module:
        return _laid_out(config, name, dtype)[0]

    own = tuple(graph for graph in all_graphs(config, plan) if graph.part == name)
    module, weights = _laid_out(config, name, dtype)
    if name == "code_predictor":  # the talker's table, which lies on the same cores twice
        (_, pieces), *_ = codec_embedding_pieces()
        whole = [*weights.pieces, ("code0_embedding.weight", pieces)]
        weights = replace(weights, pieces=whole)
    missing = dict(module.named_parameters()).keys() ^ dict(weights.pieces).keys()
    assert not missing, f"{name}: parameters and pieces differ in {sorted(missing)}"
    return PartSpec(name, own, plan.tp, plan.lnc, plan.profile, dtype, make, weights)


def _laid_out(config: OmniConfig, name: str, dtype: torch.dtype) -> tuple[nn.Module, Part]:
    models, parts = lay_out(static_config(config), (GRAPH_STAGES[GRAPH_OF_PART[name]],))
    module: nn.Module = getattr(models, name)
    spell_out_norms(module)
    for parameter in module.parameters():
        # Not Module.to, which would round the constants, too.
        parameter.data = parameter.data.to(dtype)
    return module, parts[name]
