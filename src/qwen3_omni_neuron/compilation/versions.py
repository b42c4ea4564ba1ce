"""Versions of the installed packages, found without importing them."""

import platform
from collections.abc import Iterable
from importlib import metadata

PACKAGE = "qwen3-omni-neuron"
PACKAGE_VERSION = "0.1.0"  # defined only here; pyproject.toml reads it
LIBRARIES = ("torch", "tokenizers", "transformers", "huggingface_hub", "safetensors", "numpy")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, this package and its installed libraries, by name."""
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
    """Return the versions of this package and of others, "not installed" for a missing one."""
    found = {name: installed_version(name) or "not installed" for name in packages}
    return {PACKAGE: PACKAGE_VERSION} | found
