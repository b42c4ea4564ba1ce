"""Engines by target and placement: all in this process, or each in one of its own."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.cpu.build import build_engine, build_engines
from qwen3_omni_neuron.engines.protocols import Engines, Talker, Thinker, Vocoder
from qwen3_omni_neuron.engines.remote import remote_engines
from qwen3_omni_neuron.engines.spec import EngineSpec
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.build import build_neuron_engine, build_neuron_engines
from qwen3_omni_neuron.neuron.cores import CorePlan, instance_type, plan_cores
from qwen3_omni_neuron.neuron.load import NeuronSpec
from qwen3_omni_neuron.process.engine_process import EngineProcess

PLACEMENTS = ("shared", "split")
READY_TIMEOUT_S = 3600.0  # reading 70 GB of weights from a slow disk


def load_engines(spec: EngineSpec | NeuronSpec, placement: str) -> Engines:
    """The engines of a checkpoint, on the CPU or, by a NeuronSpec, over its compiled tree.

    placement: one of PLACEMENTS. "shared": all in this process. "split": thinker, talker with code
    predictor, and vocoder each in a process of its own, which reads its own weights. Each has its
    own share of the threads that torch has here now, and on Neuron the cores of cores.plan_cores.
    Raises CheckpointError (see weights.load_parts), ArtifactError, EngineDiedError, and OptionError
    (see cores.plan_cores).
    """
    config = spec.engine.config if isinstance(spec, NeuronSpec) else spec.config
    speaks = config.talker is not None and config.code2wav is not None
    stages = STAGES if speaks else STAGES[:1]
    # Not all of them for each: stages run side by side, and OpenMP's threads spin while they wait
    # for each other, which costs several times what they gain where there are more than cores.
    threads = max(1, torch.get_num_threads() // len(stages))
    cores = _cores(spec, placement, stages) if isinstance(spec, NeuronSpec) else None
    if placement == "shared":
        engines = _build_here(spec, cores)
        return replace(engines, enter_thread=partial(torch.set_num_threads, threads))
    return _start_each(spec, cores, stages, threads)


def _cores(spec: NeuronSpec, placement: str, stages: Sequence[str]) -> CorePlan:
    instance, plan = spec.instance or instance_type(), spec.engine.plan
    return plan_cores(instance, placement, plan.tp, plan.lnc, spec.cores, stages)


def _build_here(spec: EngineSpec | NeuronSpec, cores: CorePlan | None) -> Engines:
    if not isinstance(spec, NeuronSpec):
        return build_engines(spec)
    assert cores is not None
    take_cores(cores.environment("thinker"))  # those of every stage
    return build_neuron_engines(spec)


def take_cores(environment: Mapping[str, str]) -> None:
    """Put what names this process's cores into its environment, before Neuron's runtime starts in
    it. Raises OptionError where they are named there already, and are others."""
    for name, value in environment.items():
        if os.environ.get(name, value) != value:
            raise OptionError(
                f"{name} is {os.environ[name]!r} in this process, and {value!r} is planned. Unset "
                "it, or name its cores in the argument cores."
            )
    os.environ.update(environment)


def _start_each(
    spec: EngineSpec | NeuronSpec, cores: CorePlan | None, stages: Sequence[str], threads: int
) -> Engines:
    processes: dict[str, EngineProcess] = {}
    try:
        for stage in stages:  # all at once, so that they read their weights side by side
            environment = None if cores is None else cores.environment(stage)
            processes[stage] = EngineProcess(stage, _factory(spec, stage), environment, threads)
    except BaseException:
        for process in processes.values():
            process.close()
        raise
    return remote_engines(
        processes["thinker"], processes.get("talker"), processes.get("vocoder"), READY_TIMEOUT_S
    )


def _factory(spec: EngineSpec | NeuronSpec, stage: str) -> Callable[[], Thinker | Talker | Vocoder]:
    if isinstance(spec, NeuronSpec):
        return partial(build_neuron_engine, spec, stage)
    return partial(build_engine, spec, stage)
