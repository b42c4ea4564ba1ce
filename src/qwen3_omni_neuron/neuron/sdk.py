"""Is the Neuron SDK here?"""

import importlib.util

from qwen3_omni_neuron.compilation.versions import NEURON_SDK
from qwen3_omni_neuron.errors import NotInstalledError

_PACKAGES = (
    "torch_neuronx",
    "libneuronxla",
    "neuronx_distributed",
    "neuronx_distributed_inference",
)


def require_sdk() -> None:
    """Raises NotInstalledError that names the packages which are not there."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise NotInstalledError(
            f"target neuron needs {', '.join(absent)}, not installed here. They come with the "
            f"Neuron SDK {NEURON_SDK}: see README, and `qwen3-omni-neuron doctor` for what is here."
        )
