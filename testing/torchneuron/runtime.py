"""TorchNeuron's runtime made of the stand-in for its backend, gloo, and a CPU."""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.compilation.target import EngineSpec, Target
from qwen3_omni_neuron.compilation.tree import open_tree
from qwen3_omni_neuron.conversation.template import Conversation
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from qwen3_omni_neuron.neuron.torchneuron.compile import compile_graph
from qwen3_omni_neuron.neuron.torchneuron.runtime import Seat, join_nobody
from qwen3_omni_neuron.neuron.torchneuron.target import TORCHNEURON
from qwen3_omni_neuron.targets import TARGETS
from testing.specs import plan_of

CPU = torch.device("cpu")
# One graph of each kind. 16 rows and fewer than the window follow in one call, more in several.
SETTINGS: dict[str, Any] = {
    "tp": 1,
    "dtype": "float32",
    "max_concurrency": 2,
    "context_length": 128,
    "talker_context_length": 128,
    "prompt_buckets": (128,),
    "decode_buckets": (128,),
    "patch_buckets": (256,),
    "audio_windows": (1,),
    "projection_rows": (32,),
    "batches": (2,),
    "chunk_frames": (4,),
}


@dataclass(frozen=True)
class StandIn:
    """A neuron.torchneuron.runtime.Runtime. seen: a folder that takes each rank's variables."""

    seen: Path | None = None
    names: tuple[str, ...] = field(
        default=("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "LOCAL_RANK")
    )

    def start(self, seat: Seat) -> torch.device:
        if self.seen is not None:
            values = " ".join(os.environ.get(name, "none") for name in self.names)
            (self.seen / str(os.getpid())).write_text(values, encoding="utf-8")
        self._register()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        seat.join("gloo")
        return CPU

    def start_compiling(self, ranks: int) -> torch.device:
        self._register()
        join_nobody(ranks)
        return CPU

    def _register(self) -> None:
        from testing.torchneuron.backend import register

        register()


def stand_in_target(runtime: StandIn | None = None) -> Target:
    """The target torchneuron over the stand-in. It can be sent to another process."""
    runtime = runtime or StandIn()
    return replace(
        TORCHNEURON,
        versions=stand_in_versions,
        compile_graph=partial(compile_graph, runtime=runtime),
        build_engines=partial(build_engines, runtime=runtime),
    )


def stand_in_versions() -> dict[str, str]:
    return TORCHNEURON.versions()


def compile_for_stand_in(checkpoint: Path, tree: Path, **settings: Any) -> Path:
    """Compile a checkpoint into a tree. settings: of its plan, in the place of SETTINGS."""
    plan = plan_of(checkpoint, read_config(checkpoint), "torchneuron", **(SETTINGS | settings))
    outcome = compile_tree(plan, tree, stand_in_target())
    assert not outcome.missing
    return tree


def tree_spec(checkpoint: Path, tree: Path) -> EngineSpec:
    """Open a tree."""
    config = read_config(checkpoint)
    plan = open_tree(tree, checkpoint, config, TARGETS, {})
    return EngineSpec(plan, config, Conversation(checkpoint, config).newline_id, tree)


def omni_over(engines: Engines, spec: EngineSpec) -> Qwen3Omni:
    """Put a model over engines."""
    conversation = Conversation(spec.plan.model, spec.config)
    defaults = read_generation_defaults(spec.plan.model)
    return Qwen3Omni(spec.config, defaults, conversation, engines, max_queued=8)
