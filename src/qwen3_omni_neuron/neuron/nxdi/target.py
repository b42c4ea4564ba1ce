"""The target of AWS Neuron's SDK 2.31, with NxDI."""

from dataclasses import replace

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.target import LazyFunction, Target
from qwen3_omni_neuron.compilation.versions import decisive_versions
from qwen3_omni_neuron.neuron import target as neuron_target
from qwen3_omni_neuron.neuron.versions import NEURON_PACKAGES, require_sdk

LIMITS = replace(
    neuron_target.LIMITS,
    target="neuron",
    # NxDI has one process for all cores, and its decoders have one degree.
    tp={name: Degrees.same(tp.thinker) for name, tp in neuron_target.LIMITS.tp.items()},
    mixed_degrees=False,
    opt_levels=(),  # each graph has its own
    chunked_prefill=False,  # NxDI's context encoding begins at position 0
    # A spoken question has 100 to 1500 rows: padding to the next size is cheap.
    sizes={
        **neuron_target.LIMITS.sizes,
        "decode_buckets": (512, 2048),
        "prompt_buckets": (256, 512, 1024, 1536, 2048, 4096),
    },
)


def versions() -> dict[str, str]:
    """Return the versions of torch and all of the Neuron SDK."""
    return decisive_versions(("torch", *NEURON_PACKAGES))


NEURON = Target(
    LIMITS,
    versions,
    compile_model=LazyFunction("qwen3_omni_neuron.neuron.nxdi.compile", "compile_model"),
    expected_bytes=LazyFunction("qwen3_omni_neuron.neuron.nxdi.compile", "expected_bytes"),
    build_engines=LazyFunction("qwen3_omni_neuron.neuron.nxdi.build", "build_engines"),
    environments=neuron_target.environments,
    require=require_sdk,
    needs_tree=True,
    keeps_failed=True,
)
