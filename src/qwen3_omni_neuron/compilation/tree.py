"""Opening of a compiled tree, checked against checkpoint, versions and settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.files import fingerprint
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.manifest import Manifest, check_files, read_manifest
from qwen3_omni_neuron.compilation.plan import (
    SAME,
    SETTINGS,
    CompilePlan,
    compile_command,
    cores_of_stages,
    make_plan,
    models_of,
)
from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.errors import ArtifactError, OptionError
from qwen3_omni_neuron.model.config import OmniConfig

# Manifests of earlier versions lack predictor_dtype, which was "same".
_EARLIER: dict[str, Any] = {"predictor_dtype": SAME}


def open_tree(
    folder: Path,
    model: Path,
    config: OmniConfig,
    targets: Mapping[str, Target],
    given: Mapping[str, Any],
    adapters: Sequence[AdapterPath] = (),
) -> CompilePlan:
    """Check a tree against a checkpoint; return the plan that it was compiled for.

    model: the checkpoint's folder. targets: by name; the tree must be for one of them. given: the
    caller's settings, which the plan must have; None: any. adapters: merged at the compile. Files
    are checked for presence and size, not hashed. Raises ArtifactError with the mismatch and a
    command that compiles a fitting tree, and OptionError for a setting that contradicts the plan.
    """
    manifest = manifest_of(folder, model, targets, adapters)
    plan = replace(_plan(folder, model, config, targets, manifest.plan), adapters=tuple(adapters))
    again = _again(folder, model, manifest, adapters)
    for name, value in given.items():
        compiled = plan.settings[name]
        if value is not None and value != compiled:
            raise OptionError(
                f"{name} is {value!r}, but {folder} was compiled with {compiled!r}. Leave it out, "
                "or compile another tree with it."
            )
    if (found := fingerprint(model, adapters)) != manifest.fingerprint:
        merged = " and ".join(manifest.adapters)
        raise ArtifactError(
            f"{folder} was compiled from another checkpoint or with other adapters than {model} "
            f"with {' and '.join(map(str, adapters)) or 'none'} (fingerprint "
            f"{manifest.fingerprint[:12]} against {found[:12]}; it has {merged or 'none'}). Pass "
            f"the original ones, or: {again}"
        )
    if absent := [model for model in models_of(config) if model not in manifest.models]:
        raise ArtifactError(f"{folder} lacks {', '.join(absent)}. {again}")
    return plan


def manifest_of(
    folder: Path,
    model: str | Path,
    targets: Mapping[str, Target],
    adapters: Sequence[AdapterPath] = (),
) -> Manifest:
    """Return a tree's manifest, checked without its checkpoint.

    model, adapters: as the caller names them, for the command in errors. Raises ArtifactError for
    an unknown target, other versions, and files that are missing or of another size.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder. Set compiled_path to compile's --out.")
    manifest = read_manifest(folder)
    target = manifest.plan.get("target")
    if target is None or target not in targets:
        raise ArtifactError(
            f"{folder} was compiled for target {target!r}, and this version supports "
            f"{', '.join(targets)}. Compile again for one of them."
        )
    again = _again(folder, model, manifest, adapters)
    for name, version in targets[target].versions().items():
        if (theirs := manifest.versions.get(name)) != version:
            raise ArtifactError(
                f"{folder} was compiled with {name} {theirs}, but this machine has {version}. "
                f"{again}"
            )
    try:
        check_files(folder, manifest)
    except ArtifactError as error:
        raise ArtifactError(f"{error} {again}") from error
    return manifest


def _again(
    folder: Path, model: str | Path, manifest: Manifest, adapters: Sequence[AdapterPath]
) -> str:
    settings = {**_EARLIER, **manifest.plan}
    return f"Compile again: {compile_command(model, adapters, settings, folder)}"


def needed_cores(folder: str | Path, stages: Iterable[str]) -> dict[str, int]:
    """Return the cores that each stage needs. Raises ArtifactError."""
    tp = read_manifest(Path(folder)).plan.get("tp")
    try:
        return cores_of_stages(Degrees.parse(str(tp), Degrees.same(1)), stages)
    except OptionError as error:
        raise ArtifactError(f"{folder} has a plan that this version can't run: {error}") from None


def _plan(
    folder: Path,
    model: Path,
    config: OmniConfig,
    targets: Mapping[str, Target],
    manifest_plan: Mapping[str, Any],
) -> CompilePlan:
    settings = _EARLIER | {name: v for name, v in manifest_plan.items() if name in SETTINGS}
    limits = targets[settings.pop("target")].limits
    try:
        return make_plan(model, config, limits, **settings)
    except (OptionError, TypeError) as error:
        raise ArtifactError(
            f"{folder} has a plan that this version can't run ({error}). Compile again, or use "
            "the version that wrote it."
        ) from error
