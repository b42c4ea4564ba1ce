"""Engines by placement: all in this process, or each in one of its own."""

from dataclasses import replace
from functools import partial

import torch

from qwen3_omni_neuron.cpu.load import EngineSpec, build_engine, build_engines
from qwen3_omni_neuron.process.client import remote_engines
from qwen3_omni_neuron.process.engine_process import EngineProcess
from qwen3_omni_neuron.runtime.protocols import Engines

PLACEMENTS = ("shared", "split")
READY_TIMEOUT_S = 3600.0  # reading 70 GB of weights from a slow disk


def load_engines(spec: EngineSpec, placement: str) -> Engines:
    """The engines of a checkpoint. placement: one of PLACEMENTS.

    "shared": all in this process. "split": thinker, talker with code predictor, and vocoder each
    in a process of its own, which reads its own weights.
    Either way each stage gets its share of the threads that torch has here now.
    Raises CheckpointError (see weights.load_parts), EngineDiedError.
    """
    speaks = spec.config.talker is not None and spec.config.code2wav is not None
    stages = ("thinker", "talker", "vocoder") if speaks else ("thinker",)
    # Not all of them for each: stages run side by side, and OpenMP's threads spin while they wait
    # for each other, which costs several times what they gain where there are more than cores.
    threads = max(1, torch.get_num_threads() // len(stages))
    if placement == "shared":
        return replace(build_engines(spec), enter_thread=partial(torch.set_num_threads, threads))
    processes: dict[str, EngineProcess] = {}
    try:
        for stage in stages:  # all at once, so that they read their weights side by side
            factory = partial(build_engine, spec, stage)
            processes[stage] = EngineProcess(stage, factory, threads=threads)
    except BaseException:
        for process in processes.values():
            process.close()
        raise
    return remote_engines(
        processes["thinker"], processes.get("talker"), processes.get("vocoder"), READY_TIMEOUT_S
    )
