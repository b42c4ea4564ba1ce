"""Limits and cores that Neuron's entries in the table of targets share."""

from collections.abc import Mapping

from qwen3_omni_neuron.compilation.plan import CompilePlan, TargetLimits
from qwen3_omni_neuron.compilation.target import CoreRequest

LIMITS = TargetLimits(
    target="torchneuron",
    degrees=(8, 4, 2, 1),
    core_sizes=(2, 1),
    dtypes=("bfloat16", "float32", "int8"),
    mixed_arithmetic="bfloat16",
    predictor_top_k=50,
    predictor_dtypes=dict.fromkeys(("bfloat16", "int8"), ("mixed", "same", "float32")),
    chunked_prefill=True,
    sizes={
        # A window of 8 s of speech has 104 rows, with the template around it fewer than 128: a call
        # of those takes hardly longer than reading the weights of all experts. From about 200 rows
        # on, products take longer, so that a long prompt gains nothing by larger calls.
        "prompt_buckets": (128, 512),
        "decode_buckets": (512, 2048),
        "patch_buckets": (1024, 4096, 16384),
        "audio_windows": (1, 4),
        # More rows take several calls. The text projection is called at load alone.
        "projection_rows": (512,),
        "batches": (1,),
        # From 8 frames on a call takes as long as its arithmetic, so a frame costs the same in 25.
        "chunk_frames": (1, 2, 4, 8, 25),
    },
)


def environments(plan: CompilePlan, request: CoreRequest) -> Mapping[str, Mapping[str, str]]:
    """Return the environment variables that give each stage's process its cores.

    Raises OptionError; see neuron.cores.plan_cores.
    """
    from qwen3_omni_neuron.neuron.cores import instance_type, plan_cores

    instance = request.instance or instance_type()
    cores = plan_cores(
        instance, request.placement, plan.tp, plan.lnc, request.cores, request.stages
    )
    return {stage: cores.environment(stage) for stage in request.stages}
