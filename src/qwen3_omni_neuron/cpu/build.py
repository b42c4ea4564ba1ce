"""Build CPU engines from a checkpoint or a compiled tree."""

from collections.abc import Sequence

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.eager import eager_engines
from qwen3_omni_neuron.cpu.precision import library_for
from qwen3_omni_neuron.cpu.target import usable_cores
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models, load_compiled_models
from qwen3_omni_neuron.engines.protocols import StageEngines


def build_engines(spec: EngineSpec, stages: Sequence[str] = STAGES) -> StageEngines:
    """Build some stages' engines in this process, with their weights only.

    In C if it was compiled and computes the plan's dtype, else in torch. stages: of
    checkpoint.modules.STAGES. Raises CheckpointError, ArtifactError (see cpu.weights).
    """
    library = library_for(spec.plan.dtype)
    if library is None:
        return eager_engines(_models(spec, stages, packed=False), spec)
    from qwen3_omni_neuron.cpu.native.engines import native_engines

    library.grow_pool(min(max(spec.threads.values(), default=1), usable_cores()))
    return native_engines(_models(spec, stages, packed=True), spec, library)


def _models(spec: EngineSpec, stages: Sequence[str], packed: bool) -> Models:
    plan, checkpoint = spec.plan, Checkpoint(spec.plan.model, spec.plan.adapters)
    given = spec.config, plan.dtype, stages, packed
    if spec.compiled is None:
        return load_checkpoint_models(checkpoint, *given, plan.predictor_dtype)
    numbers = checkpoint.quantised, plan.predictor_dtype
    return load_compiled_models(spec.compiled, *given, *numbers)
