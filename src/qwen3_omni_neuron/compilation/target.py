"""The interface of a target: all that the package knows about a machine.

Its functions are imported when called, so that planning loads neither torch nor the Neuron SDK.
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
    """Picklable inputs from which engines are built.

    newline_id: token of the line break after a role. compiled: the tree's folder; None: weights
    come from the checkpoint. threads: CPU threads of a stage.
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
    """Requested cores; see options.LoadArguments. stages: those that need cores."""

    placement: str
    stages: Sequence[str]
    instance: str | None = None
    cores: Mapping[str, str] | None = None


EngineBuilder = Callable[[EngineSpec, Sequence[str]], "StageEngines"]
"""(spec, stages) -> each stage's engine in the calling process.

If it raises, everything loaded is closed. Raises CheckpointError, ArtifactError, NotInstalledError,
errors of a graph's first call.
"""

ModelCompiler = Callable[[CompilePlan, str, Path], ModelRecord]
"""(plan, model, empty folder) -> record. It runs in its own process, so it must be importable: a
module's function, or a partial of one."""


@dataclass(frozen=True)
class LazyFunction:
    """A module's function, imported when called, and pickled by name."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        """Import and call it."""
        return getattr(import_module(self.module), self.name)(*arguments)


@dataclass(frozen=True)
class Target:
    """One entry of `compilation.loading.TARGETS`.

    limits: allowed settings and defaults. versions: returns versions and compiler flags (by
    environment variable) that a compiled model depends on; if one differs, the model is compiled
    again. compile_model: compiles one model of a plan. expected_bytes: returns the approximate
    bytes of a model's folder. build_engines: builds some stages' engines; importable, since other
    processes call it. environments: returns each stage's environment variables that select its
    cores; raises OptionError. require: raises NotInstalledError if a compile's packages are
    missing. needs_tree: models load only from a compiled tree. keeps_failed: keep a failed
    compile's files, such as logs.
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
