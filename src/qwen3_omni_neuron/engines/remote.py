"""Engines in their own processes, with other engines' protocols."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from qwen3_omni_neuron.engines.process.engine_process import EngineGroup
from qwen3_omni_neuron.engines.protocols import Engines

_DECODER = ("slots", "context_length", "chunked_prefill")
# By stage: attributes of its protocol, and methods.
_MEMBERS = {
    "thinker": (_DECODER, ("prefill", "step", "copy", "clear")),
    "talker": (
        _DECODER,
        ("prefill_chunk", "prepare", "prefill", "predict", "step", "copy", "clear"),
    ),
    "vocoder": (
        ("slots", "chunk_frames", "frames_at_once", "frame_samples", "latency_samples"),
        ("start", "step"),
    ),
}


def remote_engines(
    factories: Mapping[str, Callable[[], Any]],
    environments: Mapping[str, Mapping[str, str]],
    threads: int,
    timeout_s: float,
) -> Engines:
    """Build each stage's engine in its own process, in parallel.

    factories, environments: by stage; these and threads: see EngineGroup. timeout_s: for each.
    Raises the errors of EngineGroup and its wait_ready, after closing all.
    """
    processes: dict[str, EngineGroup] = {}
    try:
        for stage, factory in factories.items():
            processes[stage] = EngineGroup([stage], [factory], [environments[stage]], threads)
        built: Any = {
            stage: RemoteEngine(stage, process, timeout_s) for stage, process in processes.items()
        }
    except BaseException:
        for process in processes.values():
            process.close()
        raise
    return Engines.of(built)


class RemoteEngine:
    """Engine of a stage in another process; see engines.protocols.

    Attributes are read once. Methods also raise the errors of EngineGroup.call.
    """

    def __init__(self, stage: str, process: EngineGroup, timeout_s: float) -> None:
        """Wait for the engine. Raises the errors of EngineGroup.wait_ready."""
        process.wait_ready(timeout_s)
        self.process, self.fault, self.close = process, process.fault, process.close
        attributes, methods = _MEMBERS[stage]
        for name in attributes:
            setattr(self, name, process.read(name))
        for name in methods:
            setattr(self, name, partial(process.call, name))
