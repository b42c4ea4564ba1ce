"""Versions of installed packages, found without importing them."""

from collections.abc import Iterable, Sequence

PACKAGE = "qwen3-omni-neuron"
PACKAGE_VERSION = "0.3.0"  # defined only here; pyproject.toml reads it
LIBRARIES = ("torch", "tokenizers", "transformers", "huggingface_hub", "safetensors", "numpy")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, this package and its libraries."""
    found = {name: v for name in ("python", *LIBRARIES) if (v := installed_version(name))}
    return {PACKAGE: PACKAGE_VERSION} | found


def installed_version(name: str) -> str | None:
    """Return the installed version of a package or "python", or None."""
    # Both would be most of the time of `import qwen3_omni_neuron`.
    import platform
    from importlib import metadata

    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def decisive_versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of this package and others, or "not installed"."""
    found = {name: installed_version(name) or "not installed" for name in packages}
    return {PACKAGE: PACKAGE_VERSION} | found


def missing_packages(requirements: Sequence[str], extra: str) -> list[str]:
    """Return an extra's requirements without an allowed version installed.

    requirements: lines of this package's metadata, such as "ray[serve]>=2.60; extra == 'ray'".
    """
    from packaging.requirements import Requirement

    found: list[str] = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue  # not optional
        if not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == PACKAGE:
            for other in sorted(requirement.extras):
                found += missing_packages(requirements, other)
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}")
    return list(dict.fromkeys(found))
