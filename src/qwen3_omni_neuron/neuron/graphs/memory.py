"""Memory of a plan on a core, and whether an instance has enough."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.modules import Models, cast
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import (
    MODEL_OF_PART,
    MODEL_STAGES,
    CompilePlan,
    check_groups,
    cores_of_stages,
)
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron import cores
from qwen3_omni_neuron.neuron.graphs.all import PARTS, all_graphs, predictor_types, static_models
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize

MOST_CORES = 8  # largest degree of a part
INSTANCES = ("trn2.3xlarge", "trn2.48xlarge")  # ascending
COUNTED_ELSEWHERE = {"code_predictor": "code0_embedding."}  # the talker's table, counted there
_ON_TOP = "NEFFs and scratch come on top."


@dataclass(frozen=True)
class PartSize:
    """Size of a part: whole, and per core by degree."""

    name: str
    parameters: int
    nbytes: int
    shard_bytes: dict[Degrees, int]


@dataclass(frozen=True)
class CoreMemory:
    """Memory of a plan on the fullest core, a stage's first, by degrees."""

    plan: CompilePlan
    parts: list[PartSize]
    state_bytes: dict[Degrees, dict[str, int]]

    @property
    def parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all parameters."""
        return sum(part.nbytes for part in self.parts)

    def stage_bytes(self, tp: Degrees) -> dict[str, int]:
        """Return the bytes of weights and state on a stage's first core.

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

    def tree_bytes(self, tp: Degrees) -> int:
        """Return the bytes of all ranks' weight files."""
        return sum(p.shard_bytes[tp] * tp.of(MODEL_OF_PART[p.name]) for p in self.parts)


def core_memory(config: OmniConfig, plan: CompilePlan, degrees: Sequence[Degrees]) -> CoreMemory:
    """Count a plan's weights and state on the fullest core, for each degree instead of its tp.

    Raises OptionError if a degree and the KV heads don't divide.
    """
    shards: dict[Degrees, dict[str, int]] = {}
    state: dict[Degrees, dict[str, int]] = {}
    for tp in degrees:
        own, rank = replace(plan, tp=tp), plan_models(config, plan)
        for name, module in parts_of(rank):
            parallelize(module, own.degree(name), Alone())
        shards[tp] = {name: _size(name, module)[1] for name, module in parts_of(rank)}
        state[tp] = {}
        for graph in all_graphs(config, own):
            if graph.state:
                state[tp][graph.part] = max(state[tp].get(graph.part, 0), graph.state_bytes)
    parts = [
        PartSize(name, *_size(name, module), {tp: shards[tp][name] for tp in degrees})
        for name, module in parts_of(plan_models(config, plan))
    ]
    return CoreMemory(plan, parts, state)


def instances_of(
    plan: CompilePlan, instance: str | None, defaults: Mapping[str, Degrees] | None = None
) -> dict[str, Degrees]:
    """Return instances to judge a plan on, with degrees. instance: None: the smallest that fits."""
    if defaults is not None:
        return {name: defaults[name] for name in INSTANCES}
    enough = (name for name in INSTANCES if _cores(name, plan.lnc) >= plan.tp.each[-1])
    return {instance or next(enough): plan.tp}


def placement(memory: CoreMemory, tp: Degrees, instance: str) -> tuple[str | None, str]:
    """Return "split", "shared" if only that fits, or None; and a sentence with advice."""
    plan, stages = memory.plan, memory.stage_bytes(tp)
    stages = {stage: nbytes for stage, nbytes in stages.items() if nbytes}
    available, core = _cores(instance, plan.lnc), cores.core_bytes(plan.lnc)
    needed = cores_of_stages(tp, stages)
    most, total = max(needed.values()), sum(needed.values())
    if most > available:
        return None, (
            f"It has {available} logical cores at LNC {plan.lnc}, and TP {tp} needs {most}."
        )
    shared, fullest = memory.core_bytes(tp), max(stages, key=lambda stage: stages[stage])
    said = f"{shared / 1e9:.2f} of {core / 1e9:.1f} GB on the first of {most} cores"
    if len(stages) > 1 and total <= available and stages[fullest] <= core:
        each = " + ".join(map(str, needed.values()))
        return "split", (
            f"{stages[fullest] / 1e9:.2f} of {core / 1e9:.1f} GB on the first core of the "
            f"{fullest}, the fullest of {each} cores; shared: {said}. {_ON_TOP}"
        )
    try:
        check_groups(tp, stages)
    except OptionError as error:
        return None, str(error)
    if shared <= core:
        return "shared", f"{said}. {_ON_TOP}"
    problem = f"{shared / 1e9:.2f} of {core / 1e9:.1f} GB a core with placement shared"
    if total > available:
        problem += ", and there are no cores to split the stages over."
    else:
        problem += f", {stages[fullest] / 1e9:.2f} GB a core of the {fullest} with placement split."
    ways = []
    if plan.lnc == 1 and most <= available // 2:
        ways.append(f"lnc 2 ({cores.core_bytes(2) / 1e9:.1f} GB a core)")
    if needed[fullest] < (largest := min(MOST_CORES, available)):
        ways.append(f"tp {largest}")
    if state := sum(memory.state_bytes[tp].values()):
        ways.append(
            f"fewer slots or a shorter context length (the state of {plan.max_concurrency} slots "
            f"is {state / 1e9:.2f} GB)"
        )
    return None, f"{problem} Change one or more of: {'; '.join(ways)}."


def plan_report(
    config: OmniConfig, memory: CoreMemory, instances: Mapping[str, Degrees]
) -> dict[str, Any]:
    """Return a JSON object: whether a plan fits each instance, its tree's size, and its graphs."""
    verdicts: list[dict[str, Any]] = []
    for instance, tp in instances.items():
        placed, reason = placement(memory, tp, instance)
        verdict = {"instance": instance, "tp": tp.setting, "placement": placed, "reason": reason}
        sizes = {"core_bytes": memory.core_bytes(tp), "tree_bytes": memory.tree_bytes(tp)}
        verdicts.append(verdict | sizes)
    return {
        "instances": verdicts,
        "parameters": memory.parameters,
        "bytes": memory.nbytes,
        "graphs": [graph.label for graph in all_graphs(config, memory.plan)],
    }


def plan_lines(report: dict[str, Any], memory: CoreMemory) -> Iterator[str]:
    """Yield a report in Markdown: verdicts, then a core's memory by part."""
    for one in report["instances"]:
        fits = "does not fit" if one["placement"] is None else f"fits, {one['placement']}"
        yield f"{one['instance']}, TP {one['tp']}: {fits}. {one['reason']}"
    yield ""
    for one in report["instances"]:
        size = f"{one['tree_bytes'] / 1e9:.1f} GB of weights on disk, NEFFs on top"
        yield f"tree for {one['instance']}: {size}; {len(report['graphs'])} graphs to compile"
    yield ""
    yield (
        f"{memory.parameters / 1e9:.1f} B parameters, {memory.nbytes / 1e9:.1f} GB. A part's "
        "degree (TP) is its number of cores, from the first on. Sizes per core are of the first, "
        "which has all parts."
    )
    yield ""
    degrees, core = list(memory.state_bytes), cores.core_bytes(memory.plan.lnc)
    rows = [
        [part.name, f"{part.parameters / 1e6:,.0f} M", f"{part.nbytes / 1e9:.2f}"]
        + [f"{part.shard_bytes[tp] / 1e9:.2f}" for tp in degrees]
        for part in memory.parts
    ]
    for part in memory.state_bytes[degrees[0]]:
        sizes = [f"{memory.state_bytes[tp][part] / 1e9:.2f}" for tp in degrees]
        rows.append([f"state of {part}", "", "", *sizes])
    totals = [f"{memory.core_bytes(tp) / 1e9:.2f} of {core / 1e9:.1f}" for tp in degrees]
    whole = f"{memory.parameters / 1e6:,.0f} M", f"{memory.nbytes / 1e9:.2f}"
    rows.append(["all", *whole, *totals])
    yield from table(["part", "parameters", "GB", *(f"GB a core, TP {tp}" for tp in degrees)], rows)
    yield ""
    yield f"{len(report['graphs'])} graphs: {', '.join(report['graphs'])}."


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table whose first column is text."""
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def parts_of(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that models have, by name."""
    for name in PARTS:
        module = getattr(models, name)
        if module is not None:
            yield name, module


def plan_models(config: OmniConfig, plan: CompilePlan) -> Models:
    """Return a plan's modules on the meta device, in their types."""
    models = static_models(config, getattr(torch, plan.arithmetic), plan.dtype == "int8")
    if models.code_predictor is not None:
        cast(models.code_predictor, predictor_types(plan)[0])
    return models


def _cores(instance: str, lnc: int) -> int:
    return cores.PHYSICAL_CORES[instance] // lnc


def _size(part: str, module: nn.Module) -> tuple[int, int]:
    shared = COUNTED_ELSEWHERE.get(part, "\0")
    own = [p for name, p in module.named_parameters() if not name.startswith(shared)]
    return sum(p.numel() for p in own), sum(p.nbytes for p in own)
