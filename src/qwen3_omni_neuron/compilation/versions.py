"""Which versions are installed, and which of Neuron's are supported; nothing is imported for it."""

import platform
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import metadata

PACKAGE = "qwen3-omni-neuron"
PACKAGE_VERSION = "0.1.0"
LIBRARIES = ("torch", "transformers", "huggingface_hub", "safetensors", "numpy")
# SDK 2.31, the last line with NxDI. What PyPI has under these names are placeholders.
NEURON_SDK = "2.31"
SUPPORTED_NEURON = {
    "neuronx-distributed-inference": "0.10.18399",
    "neuronx-distributed": "0.19.28492",
    "torch-neuronx": "2.9.0.2.15.*",
    "neuronx-cc": "2.26.*",
    "nki": "0.5.0",
    "transformers": "4.57.*",
    "python": "3.11, 3.12, 3.13",
}


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, this package and its libraries, by name, where installed."""
    found = {"python": platform.python_version(), PACKAGE: PACKAGE_VERSION}
    return found | {name: v for name in LIBRARIES if (v := installed_version(name)) is not None}


def installed_version(name: str) -> str | None:
    """Return the installed version of a package, or of "python"; None where it is not installed."""
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def decisive_versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of this package and of others, "not installed" where one is missing."""
    found = {name: installed_version(name) or "not installed" for name in packages}
    return {PACKAGE: PACKAGE_VERSION} | found


def is_supported(version: str, supported: str) -> bool:
    """Tell whether a version is in a list such as "2.26.*" or "3.11, 3.12": a prefix counts."""
    wanted = [pattern.strip() for pattern in supported.split(",")]
    # "2.9.0.2.15.3+abc": the part after + names a build.
    plain = version.split("+", maxsplit=1)[0]
    return any(fnmatchcase(plain, w) or plain.startswith(f"{w}.") for w in wanted)
