"""Target `torchneuron`, and settings common to both Neuron targets."""

from collections.abc import Mapping

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import (
    CompilePlan,
    TargetLimits,
    check_groups,
    cores_of_stages,
)
from qwen3_omni_neuron.compilation.target import CoreRequest, LazyFunction, Target
from qwen3_omni_neuron.compilation.versions import decisive_versions
from qwen3_omni_neuron.neuron.torchneuron.environment import COMPILER_FLAGS
from qwen3_omni_neuron.neuron.versions import TORCHNEURON_PACKAGES, require_torchneuron

# The cheapest by bench/trn2/cost.py, by the rule in test/unit/test_degrees.py.
_EIGHT_CORES = Degrees(thinker=8, talker=8, predictor=1, vocoder=1, encoders=8)
LIMITS = TargetLimits(
    target="torchneuron",
    degrees=(8, 4, 2, 1),
    tp={
        "trn2.48xlarge": _EIGHT_CORES,
        "trn2u.48xlarge": _EIGHT_CORES,
        "trn2.3xlarge": Degrees(thinker=4, talker=4, predictor=1, vocoder=1, encoders=4),
    },
    mixed_degrees=True,
    core_sizes=(2, 1),
    opt_levels=(2, 1, 3),
    dtypes=("bfloat16", "float32", "int8"),
    mixed_arithmetic="bfloat16",
    predictor_top_k=50,
    predictor_dtypes=dict.fromkeys(("bfloat16", "int8"), ("mixed", "same", "float32")),
    chunked_prefill=True,
    sizes={
        # A window of 8 s of speech with its template has fewer than 128 rows, which take about as
        # long as reading the experts' weights; from about 200 on, products dominate.
        "prompt_buckets": (128, 512),
        # With 512, too, loaded graphs may need too many DMA descriptors.
        "decode_buckets": (2048,),
        # A graph of 16,384 patches has too many instructions for the compiler.
        "patch_buckets": (1024, 4096),
        "audio_windows": (1, 4),
        # More rows take several calls. The text projection is called only at load.
        "projection_rows": (512,),
        "batches": (1,),
        # From 8 frames on a call takes as long as its arithmetic.
        "chunk_frames": (1, 2, 4, 8, 25),
    },
)


def environments(plan: CompilePlan, request: CoreRequest) -> Mapping[str, Mapping[str, str]]:
    """Return the variables that select each stage process's cores. Raises OptionError."""
    from qwen3_omni_neuron.neuron.cores import instance_type, plan_cores

    if request.placement == "shared":
        check_groups(plan.tp, request.stages)
    instance = request.instance or instance_type()
    needed = cores_of_stages(plan.tp, request.stages)
    cores = plan_cores(instance, request.placement, needed, plan.lnc, request.cores)
    return {stage: cores.environment(stage) for stage in request.stages}


def versions() -> dict[str, str]:
    """Return the versions of torch, TorchNeuron and the compiler, and its flags without -O."""
    return {**decisive_versions(TORCHNEURON_PACKAGES), **COMPILER_FLAGS}


TORCHNEURON = Target(
    LIMITS,
    versions,
    compile_model=LazyFunction("qwen3_omni_neuron.neuron.torchneuron.compile", "compile_model"),
    expected_bytes=LazyFunction("qwen3_omni_neuron.neuron.torchneuron.runtime", "expected_bytes"),
    build_engines=LazyFunction("qwen3_omni_neuron.neuron.torchneuron.build", "build_engines"),
    environments=environments,
    require=require_torchneuron,
    needs_tree=True,
    keeps_failed=True,
)
