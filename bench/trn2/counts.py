"""The graphs of a plan, each counted on one core: its cost, its floor and its expected times."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from bench.trn2.cost import FULL_RUN, UNPUBLISHED, Cost, CountingGroup, graph_cost
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.memory import parts_of, plan_models, table
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.graphs.weights import Weights


@dataclass(frozen=True)
class CountedGraph:
    """A graph on one of `tp` cores.

    floor_s: least time by published figures, no collectives. expected_s: by bound, see
    Cost.expected_s.
    """

    graph: Graph
    tp: int
    cost: Cost
    floor_s: float
    expected_s: Mapping[str, float]


def count_graphs(
    config: OmniConfig, plan: CompilePlan, degrees: Sequence[Degrees]
) -> list[CountedGraph]:
    """Lay out every graph of a plan on the meta device, for each of some degrees, and count it.

    Returns each graph and degree once, in the order of neuron.graphs.all. Raises OptionError where
    a degree and the KV heads don't divide.
    """
    counted: dict[tuple[int, str], CountedGraph] = {}
    for tp in degrees:
        own = replace(plan, tp=tp)
        counter = _LayerCounter(config, own)
        for graph in all_graphs(config, own):
            key = degree, _ = own.degree(graph.part), graph.label
            if key not in counted:
                cost = counter.cost(graph)
                expected_s = {b: cost.expected_s(b, degree, plan.lnc) for b in UNPUBLISHED}
                floor_s = cost.floor_s(plan.lnc)
                counted[key] = CountedGraph(graph, degree, cost, floor_s, expected_s)
    return list(counted.values())


def cost_table(graphs: Sequence[CountedGraph]) -> str:
    """Format the costs in Markdown, a row a graph."""
    head = ["graph", "TP", "GFLOP", "MB weights", "MB state", "sums", "KB a sum"]
    head += ["k instructions", "k descriptors"]
    rows = []
    for counted in graphs:
        cost = counted.cost
        rows.append(
            [
                counted.graph.label,
                str(counted.tp),
                f"{cost.flops / 1e9:.2f}",
                f"{cost.weight_bytes / 1e6:.1f}",
                f"{cost.state_bytes / 1e6:.1f}",
                str(cost.sums),
                f"{cost.sum_bytes / max(1, cost.sums) / 1e3:.1f}",
                f"{cost.instructions / 1e3:.0f}",
                f"{cost.descriptors / 1e3:.0f}",
                f"{counted.floor_s * 1e3:.3f}",
                *(f"{seconds * 1e3:.3f}" for seconds in counted.expected_s.values()),
            ]
        )
    return "\n".join(table([*head, "floor ms", *(f"{bound} ms" for bound in UNPUBLISHED)], rows))


class _LayerCounter:
    """Counter of a plan's graphs on the first core.

    Each part is counted with few layers and with one more, of which its others are repetitions: a
    graph of the thinker's 48 layers takes 9 layers' time.
    """

    def __init__(self, config: OmniConfig, plan: CompilePlan):
        self._layers = _layers(config)
        # The first layers differ: deepstack's rows are taken or given there.
        first = max(2, len(config.thinker.vision.deepstack_layers) + 1)
        self._few = dict.fromkeys(self._layers, 2) | {"thinker": first, "vision_encoder": first}
        for part in self._layers.keys() & {"thinker", "talker"}:
            # New keys and values of all layers are moved together, from FULL_RUN bytes on as fast
            # as more of them.
            width = decoder_config(config, part).head_dim * getattr(torch, plan.arithmetic).itemsize
            self._few[part] = max(self._few[part], -(-FULL_RUN // (2 * width)))
        self._ranks = [self._rank(config, plan, more) for more in (0, 1)]
        whole, (_, shallow, _) = ranks_of(config, plan)[0], self._ranks[1]
        self._joined = {
            part: _joined_weights(module) - _joined_weights(getattr(shallow, part))
            for part, module in parts_of(whole)
        }

    def cost(self, graph: Graph) -> Cost:
        """Return the cost of a graph of the whole depth."""
        more, part = self._cost(graph, 1), graph.part
        times = self._layers.get(part, 0) - self._few.get(part, 0) - 1
        if times <= 0:
            return more
        # Weights are joined, so that more layers are more inputs only where a tensor is full.
        inputs = more.inputs + (self._joined[part] if more.weight_bytes else 0)
        return replace(_repeated(self._cost(graph, 0), more, times), inputs=inputs)

    def _rank(
        self, config: OmniConfig, plan: CompilePlan, more: int
    ) -> tuple[dict[str, Graph], Models, dict[str, CountingGroup]]:
        few = {p: min(layers, self._few[p] + more) for p, layers in self._layers.items()}
        shallow = _of_depth(config, few)
        graphs = {graph.label: graph for graph in all_graphs(shallow, plan)}
        return graphs, *ranks_of(shallow, plan)

    def _cost(self, graph: Graph, more: int) -> Cost:
        graphs, models, groups = self._ranks[more]
        part = graph.part
        return graph_cost(graphs[graph.label], getattr(models, part), groups[part])


def _joined_weights(module: nn.Module) -> int:
    """Return the number of tensors that a part's weights are joined in."""
    return len(Weights(module, torch.device("meta")).tensors)


def _layers(config: OmniConfig) -> dict[str, int]:
    """Return the number of layers of each part that has some."""
    thinker, talker = config.thinker, config.talker
    layers = {
        "audio_encoder": thinker.audio.layers,
        "vision_encoder": thinker.vision.layers,
        "thinker": thinker.text.layers,
    }
    if talker is not None:
        layers |= {"talker": talker.text.layers, "code_predictor": talker.predictor.layers}
    if config.code2wav is not None:
        layers["code2wav"] = config.code2wav.layers
    return layers


def _of_depth(config: OmniConfig, layers: Mapping[str, int]) -> OmniConfig:
    """Return a config with so many layers of each part. The first ones have deepstack's rows."""
    thinker, talker, wav = config.thinker, config.talker, config.code2wav
    deepstack = tuple(range(len(thinker.vision.deepstack_layers)))
    vision = replace(thinker.vision, layers=layers["vision_encoder"], deepstack_layers=deepstack)
    thinker = replace(
        thinker,
        text=replace(thinker.text, layers=layers["thinker"]),
        audio=replace(thinker.audio, layers=layers["audio_encoder"]),
        vision=vision,
    )
    if talker is not None:
        talker = replace(
            talker,
            text=replace(talker.text, layers=layers["talker"]),
            predictor=replace(talker.predictor, layers=layers["code_predictor"]),
            accept_hidden_layer=min(talker.accept_hidden_layer, layers["thinker"] - 1),
        )
    if wav is not None:
        wav = replace(wav, layers=layers["code2wav"])
    return replace(config, thinker=thinker, talker=talker, code2wav=wav)


def _repeated(few: Cost, more: Cost, times: int) -> Cost:
    """Return the cost `more` with what it has beyond `few` added so many times."""

    def value(one: Any, other: Any) -> Any:
        if isinstance(one, tuple):
            return other + times * tuple((Counter(other) - Counter(one)).elements())
        return other + times * (other - one)

    values = {
        field.name: value(*(getattr(c, field.name) for c in (few, more))) for field in fields(Cost)
    }
    return Cost(**values)


def ranks_of(config: OmniConfig, plan: CompilePlan) -> tuple[Models, dict[str, CountingGroup]]:
    """Return the modules of the first core, and the groups of their cores by part."""
    models, groups = plan_models(config, plan), dict[str, CountingGroup]()
    for name, module in parts_of(models):
        degree = plan.degree(name)
        groups[name] = CountingGroup(degree)
        parallelize(module, degree, groups[name])
    return models, groups
