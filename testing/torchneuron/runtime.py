"""TorchNeuron's runtime made of the stand-in for its backend, gloo, and a CPU."""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, make_plan
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.compilation.target import EngineSpec, Target
from qwen3_omni_neuron.compilation.tree import open_tree
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.part import part_spec
from qwen3_omni_neuron.neuron.shards import write_part_shards
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from qwen3_omni_neuron.neuron.torchneuron import graph
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from qwen3_omni_neuron.neuron.torchneuron.compile import compile_model
from qwen3_omni_neuron.neuron.torchneuron.environment import CACHES, NEFF_FOLDER
from qwen3_omni_neuron.neuron.torchneuron.runtime import (
    Membership,
    Rank,
    TorchNeuron,
    make_fake_group,
)
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.specs import compiled_here
from testing.torchneuron import backend
from testing.torchneuron.outside import DEVICE, OutsideGraphs

# One graph of each kind. A prompt of more than 32 rows takes several calls.
SETTINGS: dict[str, Any] = {
    "tp": 1,
    "dtype": "float32",
    "max_concurrency": 2,
    "context_length": 128,
    "talker_context_length": 128,
    "prompt_buckets": (32,),
    "decode_buckets": (128,),
    "patch_buckets": (256,),
    "audio_windows": (1,),
    "projection_rows": (32,),
    "batches": (2,),
    "chunk_frames": (4,),
}


PENDING: list[tuple[Path, str]] = []  # NEFFs of calls that have returned
DONE: list[Path] = []  # those that were due
HANG = signal.SIGUSR2  # makes a rank hang for ever in its current call


@dataclass(frozen=True)
class StandIn(TorchNeuron):
    """A neuron.torchneuron.runtime.TorchNeuron, whose ranks hang at the signal HANG.

    A rank counts what runs on the device outside of graphs, and refuses what would be compiled, and
    has no network.

    late: a call of a compile returns before its NEFF is written, as the next `synchronise` does.
    For the graph of a number it writes nothing (""), or raises a text instead; None: at once.
    seen: folder to which each rank's variables are written. caches: False for a tree of weights
    alone: compiled graphs are kept nowhere, so that nobody sees that they were compiled.
    captures: False where a test is about something else than captured graphs, which take a second
    each at every rank: torch runs their modules as they are.
    """

    seen: Path | None = None
    caches: bool = True
    captures: bool = True
    late: dict[int, str] | None = None
    names: tuple[str, ...] = field(
        default=("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "LOCAL_RANK")
    )

    def start(self, membership: Membership) -> torch.device:
        if self.seen is not None:
            values = " ".join(os.environ.get(name, "none") for name in self.names)
            (self.seen / str(os.getpid())).write_text(values, encoding="utf-8")
        backend.register()
        if not self.caches:
            for variable in CACHES:
                del os.environ[variable]
        outside = OutsideGraphs()
        compile_module = graph.compile_module if self.captures else run_eagerly
        graph.compile_module = outside.compiler(compile_module)
        Rank.counts = outside.counts  # type: ignore[attr-defined]
        Rank.compiled = backend.COMPILED  # type: ignore[attr-defined]
        outside.__enter__()  # until the process ends
        socket.socket.connect = no_network  # type: ignore[method-assign]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        signal.signal(HANG, hang_for_ever)
        membership.join("gloo")
        return DEVICE

    def start_compiling(self, ranks: int) -> torch.device:
        backend.register()
        make_fake_group(ranks)
        if self.late is not None:
            backend.write_neff = lambda *neff: PENDING.append(neff)
        return DEVICE

    def synchronise(self) -> None:
        for path, text in PENDING[:]:
            PENDING.clear()
            DONE.append(path)
            failure = (self.late or {}).get(len(DONE) - 1)
            if failure is None:
                path.write_text(text)
            elif failure:
                raise RuntimeError(failure)


def run_eagerly(module: nn.Module, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Stand in for neuron.torchneuron.graph.compile_module: nothing is captured."""
    return module


def no_network(*_: Any) -> NoReturn:
    """Stand in for socket.socket.connect."""
    raise OSError("a rank may not need a network")


def hang_for_ever(*_: Any) -> None:
    """Loop for ever."""
    while True:
        pass


def stand_in_target(
    runtime: StandIn | None = None, mixed_arithmetic: str = TORCHNEURON.limits.mixed_arithmetic
) -> Target:
    """Return target torchneuron over the stand-in. It can be sent to another process.

    mixed_arithmetic: float32 for int8 experts whose replies are compared with those of their
    weights.
    """
    runtime = runtime or StandIn()
    return replace(
        TORCHNEURON,
        limits=replace(TORCHNEURON.limits, mixed_arithmetic=mixed_arithmetic),
        compile_model=partial(compile_model, runtime=runtime),
        build_engines=partial(build_engines, runtime=runtime),
    )


def compile_for_stand_in(
    checkpoint: Path, tree: Path, target: Target | None = None, **settings: Any
) -> EngineSpec:
    """Compile a checkpoint into a tree, and open it. settings: replace those of SETTINGS."""
    target, config = target or stand_in_target(), read_config(checkpoint)
    plan = make_plan(checkpoint, config, target.limits, **(SETTINGS | settings))
    with compiled_here():
        outcome = compile_tree(plan, tree, target)
    assert not outcome.missing
    plan = open_tree(tree, checkpoint, config, {"torchneuron": target}, {})
    return EngineSpec(plan, config, PromptBuilder(checkpoint, config).newline_id, tree)


def weights_for_stand_in(
    checkpoint: Path, tree: Path, target: Target | None = None, **settings: Any
) -> EngineSpec:
    """Write the weights of a tree without NEFFs; see StandIn.caches."""
    config, target = read_config(checkpoint), target or stand_in_target()
    plan = make_plan(checkpoint, config, target.limits, **(SETTINGS | settings))
    for model, parts in MODEL_PARTS.items():
        (tree / model / NEFF_FOLDER).mkdir(parents=True)
        (tree / model / NEFF_FOLDER / "none").touch()
        for part in parts:
            (tree / model / part).mkdir()
            spec = part_spec(config, plan, part)
            write_part_shards(spec, Checkpoint(checkpoint), tree / model / part)
    return EngineSpec(plan, config, PromptBuilder(checkpoint, config).newline_id, tree)


def omni_over(engines: Engines, spec: EngineSpec) -> Qwen3Omni:
    """Make a model over engines."""
    prompt_builder = PromptBuilder(spec.plan.model, spec.config)
    defaults = read_generation_defaults(spec.plan.model)
    return Qwen3Omni(spec.config, defaults, prompt_builder, engines, max_queued=8)
