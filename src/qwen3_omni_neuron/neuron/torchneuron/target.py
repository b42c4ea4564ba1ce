"""The entry of TorchNeuron in the table of targets: SDK 2.33, with torch.compile."""

from qwen3_omni_neuron.compilation.target import LazyFunction, Target
from qwen3_omni_neuron.compilation.versions import decisive_versions
from qwen3_omni_neuron.neuron.target import LIMITS, environments
from qwen3_omni_neuron.neuron.torchneuron.environment import COMPILER_FLAGS
from qwen3_omni_neuron.neuron.versions import TORCHNEURON_PACKAGES, require_torchneuron


def versions() -> dict[str, str]:
    """Return the versions of torch, TorchNeuron and the compiler, and the compiler's flags."""
    return {**decisive_versions(TORCHNEURON_PACKAGES), **COMPILER_FLAGS}


TORCHNEURON = Target(
    LIMITS,
    versions,
    compile_model=LazyFunction("qwen3_omni_neuron.neuron.torchneuron.compile", "compile_model"),
    expected_bytes=LazyFunction(
        "qwen3_omni_neuron.neuron.torchneuron.model_folder", "expected_bytes"
    ),
    build_engines=LazyFunction("qwen3_omni_neuron.neuron.torchneuron.build", "build_engines"),
    environments=environments,
    require=require_torchneuron,
    needs_tree=True,
    keeps_failed=True,
)
