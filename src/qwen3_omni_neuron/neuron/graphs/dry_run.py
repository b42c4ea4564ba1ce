"""The plan of a compile without weights and without a compiler: sizes, cost and floors."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.modules import Models, cast
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import (
    MODEL_OF_PART,
    MODEL_STAGES,
    CompilePlan,
    cores_of_stages,
)
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import (
    PARTS,
    all_graphs,
    predictor_types,
    static_models,
)
from qwen3_omni_neuron.neuron.graphs.cost import (
    FULL_RUN,
    TRN2,
    Chip,
    Cost,
    CountingGroup,
    graph_cost,
)
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.parallel.modules import parallelize
from qwen3_omni_neuron.neuron.graphs.weights import Weights

MOST_CORES = 8  # largest degree of a part
Show = Callable[[Sequence[tuple[int, Graph]]], Iterable[tuple[int, Graph]]]
"""Function that yields each graph of a dry run and its TP, and shows how far it has come."""
COUNTED_ELSEWHERE = {"code_predictor": "code0_embedding."}  # the talker's table, counted there


@dataclass(frozen=True)
class PartSize:
    """Size of a part: whole, and the bytes on each of its cores, by the plan's degrees."""

    name: str
    parameters: int
    nbytes: int
    shard_bytes: dict[Degrees, int]


@dataclass(frozen=True)
class PlannedGraph:
    """A graph on one of `tp` cores.

    floor_s: least time by published figures, no collectives. expected_s: see Chip.expected_s.
    """

    graph: Graph
    tp: int
    cost: Cost
    floor_s: float
    expected_s: float


@dataclass(frozen=True)
class CoreMemory:
    """Memory that a plan takes on the fullest core, by degrees. Made by `core_memory`.

    That is a stage's first core, which has a share of every part. state_bytes: size of the KV
    caches and of the vocoder's state for all slots, which the graphs of a part share. chip: the
    chip, with logical cores as the plan's lnc makes them.
    """

    plan: CompilePlan
    parts: list[PartSize]
    state_bytes: dict[Degrees, dict[str, int]]
    chip: Chip

    @property
    def parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all parameters."""
        return sum(part.nbytes for part in self.parts)

    def stage_bytes(self, tp: Degrees) -> dict[str, int]:
        """Return the bytes of weights and state on the first core of a stage, by stage.

        Placement "split" gives the stages different cores, "shared" the same ones.
        """
        stages = dict.fromkeys(MODEL_STAGES.values(), 0)
        sizes = [(part.name, part.shard_bytes[tp]) for part in self.parts]
        for name, nbytes in (*sizes, *self.state_bytes[tp].items()):
            stages[MODEL_STAGES[MODEL_OF_PART[name]]] += nbytes
        return stages

    def core_bytes(self, tp: Degrees) -> int:
        """Return weights and state on the first core with placement "shared"."""
        return sum(self.stage_bytes(tp).values())


@dataclass(frozen=True)
class DryRun(CoreMemory):
    """Result of `dry_run`.

    graphs: in the order of neuron.graphs.all, each graph and degree once.
    """

    graphs: list[PlannedGraph]


def core_memory(
    config: OmniConfig, plan: CompilePlan, degrees: Sequence[Degrees], chip: Chip = TRN2
) -> CoreMemory:
    """Count the weights and the state of a plan on the fullest core, for each of some degrees.

    The plan's lnc sets the size of a core. Its tp is not read.
    Raises OptionError where a degree and the KV heads don't divide.
    """
    shards: dict[Degrees, dict[str, int]] = {}
    state: dict[Degrees, dict[str, int]] = {}
    for tp in degrees:
        rank, _ = _rank(config, replace(plan, tp=tp))
        shards[tp] = {name: _size(name, module)[1] for name, module in _parts(rank)}
        state[tp] = {}
        for graph in all_graphs(config, replace(plan, tp=tp)):
            if graph.state:
                state[tp][graph.part] = max(state[tp].get(graph.part, 0), graph.state_bytes)
    parts = [
        PartSize(name, *_size(name, module), {tp: shards[tp][name] for tp in degrees})
        for name, module in _parts(_models(config, plan))
    ]
    return CoreMemory(plan, parts, state, replace(chip, lnc=plan.lnc))


def dry_run(
    config: OmniConfig,
    plan: CompilePlan,
    degrees: Sequence[Degrees],
    chip: Chip = TRN2,
    show: Show = lambda graphs: graphs,
) -> DryRun:
    """Lay out every graph of a plan on the meta device, for each of some degrees, and count it.

    Raises OptionError as `core_memory`.
    """
    memory = core_memory(config, plan, degrees, chip)
    listed: dict[tuple[int, str], tuple[Graph, _LayerCounter]] = {}
    for tp in degrees:
        own = replace(plan, tp=tp)
        counter = _LayerCounter(config, own)
        for graph in all_graphs(config, own):
            listed.setdefault((own.degree(graph.part), graph.label), (graph, counter))
    graphs: list[PlannedGraph] = []
    for degree, graph in show([(degree, graph) for (degree, _), (graph, _) in listed.items()]):
        _, counter = listed[degree, graph.label]
        cost = counter.cost(graph)
        floor = memory.chip.floor_s(cost.flops, cost.weight_bytes + cost.state_bytes)
        graphs.append(PlannedGraph(graph, degree, cost, floor, memory.chip.expected_s(cost)))
    return DryRun(**vars(memory), graphs=graphs)


def dry_run_text(run: DryRun) -> str:
    """Format a dry run in Markdown: a table of parts and their shards, and one of graphs."""
    degrees = list(run.state_bytes)
    lines = [
        f"{run.parameters / 1e9:.1f} B parameters, {run.nbytes / 1e9:.1f} GB. A part is on the "
        "first cores, as many as its degree (TP), and a core is the first one: it has all parts.",
        "",
        *table(
            ["part", "parameters", "GB", *(f"GB a core, TP {tp}" for tp in degrees)],
            [
                [part.name, f"{part.parameters / 1e6:,.0f} M", f"{part.nbytes / 1e9:.2f}"]
                + [f"{part.shard_bytes[tp] / 1e9:.2f}" for tp in degrees]
                for part in run.parts
            ]
            + [
                [f"state of {part}", "", ""]
                + [f"{run.state_bytes[tp][part] / 1e9:.2f}" for tp in degrees]
                for part in run.state_bytes[degrees[0]]
            ]
            + [
                ["all", f"{run.parameters / 1e6:,.0f} M", f"{run.nbytes / 1e9:.2f}"]
                + [
                    f"{run.core_bytes(tp) / 1e9:.2f} of {run.chip.core_bytes / 1e9:.1f}"
                    for tp in degrees
                ]
            ],
        ),
        "",
        f"One call on one core of {run.chip.name} at LNC {run.chip.lnc}. The floor is an estimate: "
        "what is read over the published bandwidth or what is computed over the published peak, "
        "the longer of the two; sums over the cores are left out. Expected is a model, too: what a "
        "lowering moves besides, the latency of products and sums, and the host's part of a call.",
        "",
        *table(
            [
                *("graph", "TP", "GFLOP", "MB weights", "MB state", "sums", "KB a sum"),
                *("floor ms", "expected ms"),
            ],
            [
                [
                    planned.graph.label,
                    str(planned.tp),
                    f"{planned.cost.flops / 1e9:.2f}",
                    f"{planned.cost.weight_bytes / 1e6:.1f}",
                    f"{planned.cost.state_bytes / 1e6:.1f}",
                    str(planned.cost.sums),
                    f"{planned.cost.sum_bytes / max(1, planned.cost.sums) / 1e3:.1f}",
                    f"{planned.floor_s * 1e3:.3f}",
                    f"{planned.expected_s * 1e3:.3f}",
                ]
                for planned in run.graphs
            ],
        ),
    ]
    return "\n".join(lines)


def does_not_fit(run: CoreMemory, tp: Degrees, cores: int = 64) -> str:
    """Return what is too large for a core and what to change; empty where all parts fit.

    cores: logical cores of the instance, for which the changes have to leave enough.
    """
    shared, memory, plan = run.core_bytes(tp), run.chip.core_bytes, run.plan
    if shared <= memory:
        return ""
    stages, state = run.stage_bytes(tp), sum(run.state_bytes[tp].values())
    fullest = max(stages, key=lambda stage: stages[stage])
    problem = f"TP {tp} does not fit: {shared / 1e9:.2f} of {memory / 1e9:.1f} GB a core"
    split = f"{stages[fullest] / 1e9:.2f} GB on each core of the {fullest}"
    ways = []
    if sum(cores_of_stages(tp, filter(stages.get, stages)).values()) > cores:
        problem += ", and there are no cores to split the stages over."
    elif stages[fullest] <= memory:
        problem += " with placement shared."
        ways.append(f"placement split ({split})")
    else:
        problem += f" with placement shared, {split} with placement split."
    if run.chip.lnc == 1 and tp.each[-1] <= cores // 2:
        ways.append(f"lnc 2 ({replace(run.chip, lnc=2).core_bytes / 1e9:.1f} GB a core)")
    if cores_of_stages(tp, [fullest])[fullest] < (most := min(MOST_CORES, cores)):
        ways.append(f"tp {most}")
    if state:
        slots = f"{plan.max_concurrency} slot{'s' * (plan.max_concurrency > 1)}"
        fewer = "fewer slots or a shorter" if plan.max_concurrency > 1 else "a shorter"
        ways.append(f"{fewer} context length (the state of {slots} is {state / 1e9:.2f} GB)")
    return f"{problem} Change one or more of: {'; '.join(ways)}."


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
        whole, (_, shallow, _) = _rank(config, plan)[0], self._ranks[1]
        self._joined = {
            part: _joined_weights(module) - _joined_weights(getattr(shallow, part))
            for part, module in _parts(whole)
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
        return graphs, *_rank(shallow, plan)

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


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table whose first column is text and whose others are not."""
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _parts(models: Models) -> Iterator[tuple[str, nn.Module]]:
    for name in PARTS:
        module = getattr(models, name)
        if module is not None:
            yield name, module


def _models(config: OmniConfig, plan: CompilePlan) -> Models:
    models = static_models(config, getattr(torch, plan.arithmetic), plan.dtype == "int8")
    if models.code_predictor is not None:
        cast(models.code_predictor, predictor_types(plan)[0])
    return models


def _rank(config: OmniConfig, plan: CompilePlan) -> tuple[Models, dict[str, CountingGroup]]:
    """Return the modules of the first core, and the groups of their cores by part."""
    models, groups = _models(config, plan), dict[str, CountingGroup]()
    for name, module in _parts(models):
        degree = plan.degree(name)
        groups[name] = CountingGroup(degree)
        parallelize(module, degree, groups[name])
    return models, groups


def _size(part: str, module: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, and their bytes."""
    shared = COUNTED_ELSEWHERE.get(part, "\0")
    own = [p for name, p in module.named_parameters() if not name.startswith(shared)]
    return sum(p.numel() for p in own), sum(p.nbytes for p in own)
