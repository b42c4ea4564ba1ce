"""The interface of a target: everything that the rest of the package knows about a machine.

`compilation.loading.TARGETS` is the table of targets. An entry's functions are imported when they
are called, so that planning a compile loads neither torch nor the Neuron SDK.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.compilation.manifest import ModelRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan, TargetLimits
from qwen3_omni_neuron.model.config import OmniConfig

if TYPE_CHECKING:
    import torch

    from qwen3_omni_neuron.engines.protocols import StageEngines


@dataclass(frozen=True)
class EngineSpec:
    """Inputs from which engines are built; small, to be sent to another process.

    newline_id: the token of the line break after a role. compiled: the compiled tree's folder;
    None: the weights are read from the checkpoint. threads: number of CPU threads that a stage may
    use at a time, by the stage's name.
    """

    plan: CompilePlan
    config: OmniConfig
    newline_id: int
    compiled: Path | None = None
    threads: Mapping[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of activations."""
        import torch

        return getattr(torch, self.plan.arithmetic)


@dataclass(frozen=True)
class CoreRequest:
    """Requirements for cores; see options.LoadArguments. stages: those that need cores."""

    placement: str
    stages: Sequence[str]
    instance: str | None = None
    cores: Mapping[str, str] | None = None


EngineBuilder = Callable[[EngineSpec, Sequence[str]], "StageEngines"]
"""(spec, stages) -> the engine of each stage, ready to be called, in the process that calls it.

If it raises, everything that it had loaded is closed. Raises CheckpointError, ArtifactError,
NotInstalledError, and the error of a graph's first call.
"""

ModelCompiler = Callable[[CompilePlan, str, Path], ModelRecord]
"""(plan, model, folder) -> record. The folder exists and is empty. It runs in a process of its own,
so it must be importable: a function of a module, or a partial of one."""


@dataclass(frozen=True)
class LazyFunction:
    """A function of a module, imported when it is called, that can be sent to a process by name."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        """Import the function and call it."""
        return getattr(import_module(self.module), self.name)(*arguments)


@dataclass(frozen=True)
class Target:
    """One entry of `compilation.loading.TARGETS`.

    limits: the settings that a plan may have, and their defaults. versions: returns the versions
    that a compiled model depends on, and the flags of its compiler, by environment variable; if one
    differs, the model is compiled again. compile_model: compiles one model of a plan.
    expected_bytes: returns the approximate size in bytes of a model's folder. build_engines: builds
    the engines of some stages; importable, since other processes call it. environments: returns, by
    stage, the environment variables that give its process its cores. Raises OptionError. require:
    raises NotInstalledError where packages that a compile needs are not installed. needs_tree:
    a model can only be loaded from a compiled tree. keeps_failed: a failed compile leaves files
    worth keeping, such as a compiler's logs.
    """

    limits: TargetLimits
    versions: Callable[[], dict[str, str]]
    compile_model: ModelCompiler
    expected_bytes: Callable[[CompilePlan, str], int]
    build_engines: EngineBuilder
    environments: Callable[[CompilePlan, CoreRequest], Mapping[str, Mapping[str, str]]]
    require: Callable[[], object] = lambda: None
    needs_tree: bool = False
    keeps_failed: bool = False
