"""The entry of the CPU in the table of targets."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES, CompilePlan, TargetLimits
from qwen3_omni_neuron.compilation.target import CoreRequest, LazyFunction, Target
from qwen3_omni_neuron.compilation.versions import decisive_versions
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig

_quantised_dtype = LazyFunction("qwen3_omni_neuron.cpu.weights", "quantised_dtype")  # needs torch


def auto_dtype(folder: Path, config: OmniConfig, adapters: Sequence[AdapterPath]) -> str:
    """Return the dtype of "auto". Raises CheckpointError.

    With the compiled library a quantised checkpoint has its own; torch would widen it.
    """
    if read_settings(folder) is None or find_library() is None:
        return "mixed" if config.dtype == "bfloat16" else config.dtype
    dtype: str = _quantised_dtype(folder, config, adapters)
    return dtype


LIMITS = TargetLimits(
    target="cpu",
    degrees=(1,),
    tp={"": Degrees.same(1)},
    core_sizes=(1,),
    dtypes=("mixed", "float32", "int8", "int4", "bfloat16", "float64"),
    auto_dtype=auto_dtype,
    predictor_top_k=0,
    predictor_dtypes=dict.fromkeys(("int8", "int4", "bfloat16"), ("mixed", "same")),
    chunked_prefill=True,
    sizes={"patch_buckets": (), "chunk_frames": CHUNK_FRAMES},
)


def no_cores(plan: CompilePlan, request: CoreRequest) -> Mapping[str, Mapping[str, str]]:
    """Return empty environments. Raises OptionError if an instance or cores were named."""
    for name, value in (("instance", request.instance), ("cores", request.cores)):
        if value is not None:
            raise OptionError(
                f"{name} is only for the targets on Neuron, and this is for target {plan.target}. "
                "Leave it out."
            )
    return {stage: {} for stage in request.stages}


def usable_cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Compiled models have this package's layout, so only its version makes them stale.
CPU = Target(
    LIMITS,
    decisive_versions,
    compile_model=LazyFunction("qwen3_omni_neuron.cpu.weights", "compile_model"),
    expected_bytes=LazyFunction("qwen3_omni_neuron.cpu.weights", "expected_bytes"),
    build_engines=LazyFunction("qwen3_omni_neuron.cpu.build", "build_engines"),
    environments=no_cores,
)
