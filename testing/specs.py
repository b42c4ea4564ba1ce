"""Plans and engines over a checkpoint, with a test's own settings."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation import runner
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.loading import find_target
from qwen3_omni_neuron.compilation.manifest import ModelRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan, make_plan
from qwen3_omni_neuron.compilation.target import EngineSpec, ModelCompiler
from qwen3_omni_neuron.cpu.build import build_engines
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.released import RELEASED


def plan_of(model: Path, config: OmniConfig, target: str = "cpu", **settings: Any) -> CompilePlan:
    """Make a plan for a target by its name. settings: see `compilation.plan.make_plan`."""
    return make_plan(model, config, find_target(target).limits, **settings)


def decoder_plan(tp: int, slots: int, context: int, **changes: Any) -> CompilePlan:
    """Make a plan of target neuron for any number of cores; float32 and one bucket unless given."""
    sizes = {"max_concurrency": slots, "context_length": context}
    buckets = dict.fromkeys(("prompt_buckets", "decode_buckets"), (context,))
    plan = plan_of(Path(), RELEASED, "neuron", dtype="float32", **sizes, **buckets)
    return replace(plan, tp=Degrees.same(tp), **changes)


def engine_spec(checkpoint: Path, target: str = "cpu", **settings: Any) -> EngineSpec:
    """Make a spec. settings: float32, two slots and 256 positions unless given."""
    usual: dict[str, Any] = {"dtype": "float32", "max_concurrency": 2, "context_length": 256}
    config = read_config(checkpoint)
    plan = plan_of(checkpoint, config, target, **(usual | settings))
    return EngineSpec(plan, config, PromptBuilder(checkpoint, config).newline_id)


def cpu_engines(spec: EngineSpec) -> Engines:
    """Build all engines on the CPU from the checkpoint, whatever the spec's target and tree are."""
    return Engines.of(build_engines(replace(spec, compiled=None)))


@contextmanager
def compiled_here() -> Iterator[None]:
    """Compile models in this process: a worker process for each imports torch, two seconds each.

    Changes that a compile makes to the environment end with it, as in a worker process.
    """

    def run(
        compile_model: ModelCompiler,
        plan: CompilePlan,
        model: str,
        folder: Path,
        _lock: int,
        _tick: Callable[[], None],
    ) -> ModelRecord:
        with mock.patch.dict(os.environ):
            return compile_model(plan, model, folder)

    with mock.patch.object(runner, "run_worker", run):
        yield
