"""Load engines: choose the target, its plan, and the process of each stage.

To add a target, write its `compilation.target.Target` and add it to `TARGETS`; nothing else in the
package knows a target by name. Modules that need torch are imported where engines are built: a
compile plans and runs its workers without torch.
"""

import os
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.compilation.plan import SETTINGS, CompilePlan, make_plan
from qwen3_omni_neuron.compilation.target import (
    CoreRequest,
    EngineBuilder,
    EngineSpec,
    LazyFunction,
    Target,
)
from qwen3_omni_neuron.compilation.tree import manifest_of, open_tree
from qwen3_omni_neuron.engines.process.fork import note_load
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import one_of

if TYPE_CHECKING:
    from qwen3_omni_neuron.engines.protocols import Engines, Talker, Thinker, Vocoder
    from qwen3_omni_neuron.options import LoadOptions

READY_TIMEOUT_S = 3600.0  # reading 70 GB of weights from a slow disk


class Targets(UserDict[str, Any]):
    """Targets by name, imported on lookup: the CPU needs no Neuron code."""

    def __getitem__(self, name: str) -> Target:
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(import_module(module), attribute)
        return entry


TARGETS = Targets(
    {
        "cpu": "qwen3_omni_neuron.cpu.target:CPU",
        "neuron": "qwen3_omni_neuron.neuron.nxdi.target:NEURON",
        "torchneuron": "qwen3_omni_neuron.neuron.target:TORCHNEURON",
    }
)
DEFAULT_TARGET = "cpu"
# Samples any target's tokens on this host.
host_sampler = LazyFunction("qwen3_omni_neuron.cpu.native.installed", "host_sampler")


def find_target(name: str) -> Target:
    """Return the target of this name. Raises OptionError."""
    replace(SETTINGS["target"], values=one_of(*TARGETS)).check(name)
    return TARGETS[name]


def resolve_model(model_path: str | Path, options: "LoadOptions") -> Path:
    """Check the compiled tree, then resolve a checkpoint's folder, perhaps by download.

    Raises the errors of resolve_checkpoint and manifest_of.
    """
    if options.compiled_path is not None:
        adapters = [AdapterPath.of(adapter) for adapter in options.adapters]
        manifest_of(Path(options.compiled_path), model_path, TARGETS, adapters)
    return resolve_checkpoint(model_path)


def plan_of(
    folder: Path, config: OmniConfig, tree: Path | None, options: "LoadOptions"
) -> CompilePlan:
    """Return the tree's plan; without a tree, a new one."""
    given = {
        name: value
        for name, value in vars(options).items()
        if name in SETTINGS and value not in (None, getattr(type(options), name))
    }
    adapters = [AdapterPath.of(adapter) for adapter in options.adapters]
    if tree is not None:
        return open_tree(tree, folder, config, TARGETS, given, adapters)
    chosen = find_target(given.pop("target", DEFAULT_TARGET))
    plan = make_plan(folder, config, chosen.limits, options.instance, adapters, **given)
    if chosen.needs_tree:
        raise OptionError(
            f"target {plan.target} needs a compiled tree: give compiled_path. To compile: "
            f"{plan.command(Path('compiled'))}"
        )
    return plan


def load_engines(target: Target, spec: EngineSpec, options: "LoadOptions") -> "Engines":
    """Build a model's engines in the processes of its placement.

    "shared": all engines in this process. "split": a process each for thinker, talker with code
    predictor, and vocoder, which reads its own weights. Stages share the threads. Raises
    OptionError for a placement that the target's cores don't allow, EngineDiedError, ForkError, and
    the errors of `compilation.target.EngineBuilder`.
    """
    note_load()
    import torch

    from qwen3_omni_neuron.checkpoint.modules import STAGES
    from qwen3_omni_neuron.engines.protocols import Engines

    config = spec.config
    speaks = config.talker is not None and config.code2wav is not None
    stages = STAGES if speaks else STAGES[:1]
    total, placement = options.threads, options.placement
    if total is None:
        total = torch.get_num_threads()
    shares = stage_threads(total, stages, placement)
    spec = replace(spec, threads=shares)
    # torch's threads spin while waiting for each other: more threads than cores cost time.
    torch_threads = max(1, total // len(stages))
    request = CoreRequest(placement, stages, options.instance, options.cores)
    environments = target.environments(spec.plan, request)
    if placement == "split":
        from qwen3_omni_neuron.engines.remote import remote_engines

        build = partial(build_engine, target.build_engines, spec)
        factories = {stage: partial(build, stage) for stage in environments}
        return remote_engines(factories, environments, torch_threads, READY_TIMEOUT_S)
    set_environment(environments[stages[0]])  # "shared": the same for all stages
    built = target.build_engines(spec, stages)
    enter_thread = partial(torch.set_num_threads, torch_threads)
    return Engines.of(built, enter_thread, shares_cores=True)


def stage_threads(total: int, stages: Sequence[str], placement: str) -> dict[str, int]:
    """Return how many CPU threads each stage may use at a time.

    In one process stages share a pool: thinker and talker use up to all idle threads, the vocoder
    up to half, or it would delay the talker's short calls (5 % for a reply of the small checkpoint
    on two cores). Separate processes have pools of their own: two parts each for thinker and
    talker, one for the vocoder.
    """
    parts = {stage: 1 if stage == "vocoder" else 2 for stage in stages}
    if placement == "split":
        return {s: max(1, total * part // sum(parts.values())) for s, part in parts.items()}
    return {stage: (total * part + 1) // 2 for stage, part in parts.items()}


def set_environment(variables: Mapping[str, str]) -> None:
    """Set the variables that select this process's cores, before the runtime starts.

    Raises OptionError if a variable is already set to another value.
    """
    for name, value in variables.items():
        if os.environ.get(name, value) != value:
            raise OptionError(
                f"{name} is {os.environ[name]!r} in this process, and {value!r} is planned. Unset "
                "it, or name its cores in the argument cores."
            )
    os.environ.update(variables)


def build_engine(
    build: EngineBuilder, spec: EngineSpec, stage: str
) -> "Thinker | Talker | Vocoder":
    """Build one stage's engine in its own process."""
    built: Mapping[str, Any] = build(spec, [stage])
    return built[stage]
