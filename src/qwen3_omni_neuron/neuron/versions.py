"""Supported versions of the Neuron SDK, and the check that it is installed."""

import importlib.util
import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase

from qwen3_omni_neuron.compilation.versions import installed_version
from qwen3_omni_neuron.errors import NotInstalledError

logger = logging.getLogger(__name__)

# SDK 2.31, the last with NxDI. PyPI has placeholders of these names.
NEURON_SDK = "2.31"
_NEURON = {  # as pinned by the extra `neuron` of pyproject.toml; nki comes with neuronx-cc
    "neuronx-distributed-inference": "0.10.18399",
    "neuronx-distributed": "0.19.28492",
    "torch-neuronx": "2.9.0.2.15.*",
    "neuronx-cc": "2.26.*",
    "nki": "0.5.0",
    "transformers": "4.57.*",
    "python": "3.11, 3.12, 3.13",
}
NEURON_PACKAGES = tuple(_NEURON)
# The SDK of target torchneuron. Its torch-neuronx's version contains torch's; no torch_xla.
TORCHNEURON_SDK = "2.33"
TORCHNEURON_VERSIONS = "2.13.3.*, 2.14.3.*"
TORCHNEURON_PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "python")
_SDK_MODULES = (
    "torch_neuronx",
    "libneuronxla",
    "neuronx_distributed",
    "neuronx_distributed_inference",
)


def supported_neuron() -> dict[str, str]:
    """Return the supported version of each of NEURON_PACKAGES."""
    return dict(_NEURON)


def supported_torchneuron() -> dict[str, str]:
    """Return the supported versions for target torchneuron."""
    return {
        "torch": "2.13, 2.14",
        "torch-neuronx": TORCHNEURON_VERSIONS,
        "python": "3.12, 3.13, 3.14",
    }


def is_supported(version: str, supported: str) -> bool:
    """Return whether a version matches a list such as "2.26.*" or "3.11, 3.12"."""
    wanted = [pattern.strip() for pattern in supported.split(",")]
    # "2.9.0.2.15.3+abc": the part after + names a build.
    plain = version.split("+", maxsplit=1)[0]
    return any(fnmatchcase(plain, w) or plain.startswith(f"{w}.") for w in wanted)


def require_sdk() -> None:
    """Raise NotInstalledError for missing SDK packages, and warn of unsupported versions."""
    absent = [name for name in _SDK_MODULES if importlib.util.find_spec(name) is None]
    if absent:
        raise NotInstalledError(
            f"target neuron needs {', '.join(absent)}, not installed here. They come with the "
            f"Neuron SDK {NEURON_SDK}: see docs/trn2.md. `qwen3-omni-neuron doctor` lists "
            "installed versions."
        )
    _warn_of_others("neuron", NEURON_SDK, supported_neuron())


def require_torchneuron() -> None:
    """Raise NotInstalledError without TorchNeuron; see require_sdk."""
    from packaging.version import Version

    version = installed_version("torch-neuronx")
    if version is None or Version(version) < Version("2.10"):  # 2.9 is the last one on torch_xla
        found = "none" if version is None else f"torch-neuronx {version}"
        raise NotInstalledError(
            f"target torchneuron needs TorchNeuron, torch-neuronx {TORCHNEURON_VERSIONS}, but "
            f"found {found}. It comes with the Neuron SDK {TORCHNEURON_SDK}: see docs/trn2.md. "
            "`qwen3-omni-neuron doctor` lists installed versions."
        )
    _warn_of_others("torchneuron", TORCHNEURON_SDK, supported_torchneuron())


def _warn_of_others(target: str, sdk: str, supported: Mapping[str, str]) -> None:
    found = [
        f"{name} {version} (supported: {wanted})"
        for name, wanted in supported.items()
        if (version := installed_version(name)) and not is_supported(version, wanted)
    ]
    if found:
        logger.warning(
            "target %s is for the Neuron SDK %s, but found %s: later errors may come from that. "
            "docs/trn2.md names the image with the supported versions.",
            target,
            sdk,
            ", ".join(found),
        )
