"""Opening a compiled tree: checks that it fits the checkpoint, the versions and the call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.files import fingerprint
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.manifest import check_files, read_manifest
from qwen3_omni_neuron.compilation.plan import (
    SETTINGS,
    CompilePlan,
    cores_of_stages,
    make_plan,
    models_of,
)
from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.errors import ArtifactError, OptionError, format_value, printable
from qwen3_omni_neuron.model.config import OmniConfig

_MOST_SIZE, _MOST_SLOTS = 1 << 24, 1 << 12
# Settings that trees of earlier versions don't have in their manifests, and what they were.
EARLIER = {name: one.default for name, one in SETTINGS.items() if one.default is not MISSING}
# Settings that trees of earlier versions have in their manifests, and plans have no more.
FORMER = frozenset({"profile", "compact"})


def open_tree(
    folder: Path,
    model: Path,
    config: OmniConfig,
    targets: Mapping[str, Target],
    given: Mapping[str, Any],
    adapters: Sequence[AdapterPath] = (),
) -> CompilePlan:
    """Check a tree against a checkpoint, and return the plan that it was compiled for.

    model: the checkpoint's folder. targets: targets by name; the tree must be of one of them.
    given: the caller's settings, which the plan must have; None: not given. adapters: those that
    were merged at the compile. Files are checked for
    presence and size, not hashed.
    Raises ArtifactError with the mismatch and the command that compiles a fitting tree, and
    OptionError for a setting that contradicts the plan.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder: compiled_path is what compile wrote.")
    manifest = read_manifest(folder)
    plan = replace(_plan(folder, model, config, targets, manifest.plan), adapters=tuple(adapters))
    again = f"Compile again: {plan.command(folder)}"
    for name, value in given.items():
        compiled = plan.settings[name]
        if value is not None and value != compiled:
            raise OptionError(
                f"{name} is {value!r}, and {folder} was compiled with {compiled!r}. Leave it out, "
                "or compile another tree with it."
            )
    if (found := fingerprint(model, adapters)) != manifest.fingerprint:
        merged = " and ".join(printable(text, 300) for text in manifest.adapters)
        raise ArtifactError(
            f"{folder} was compiled from another checkpoint or with other adapters than {model} "
            f"with {' and '.join(map(str, adapters)) or 'none'} (fingerprint "
            f"{manifest.fingerprint[:12]} against {found[:12]}; it has {merged or 'none'}). Name "
            f"those, as they were then, or: {again}"
        )
    for name, version in targets[plan.target].versions().items():
        if (theirs := manifest.versions.get(name)) != version:
            raise ArtifactError(
                f"{folder} was compiled with {name} {theirs}, and here is {version}. {again}"
            )
    if absent := [model for model in models_of(config) if model not in manifest.models]:
        raise ArtifactError(f"{folder} lacks {', '.join(absent)}. {again}")
    try:
        check_files(folder, manifest)
    except ArtifactError as error:
        raise ArtifactError(f"{error} {again}") from error
    return plan


def needed_cores(folder: str | Path, stages: Iterable[str]) -> dict[str, int]:
    """Return how many cores each of some stages needs, by a tree's manifest.

    Raises ArtifactError for a manifest that can't be read.
    """
    tp = read_manifest(Path(folder)).plan.get("tp")
    try:
        return cores_of_stages(Degrees.parse(str(tp), Degrees.same(1)), stages)
    except OptionError as error:
        raise ArtifactError(f"{folder} has a plan that this version doesn't run: {error}") from None


def _check_values(folder: Path, plan: Mapping[str, Any]) -> None:
    """Raise ArtifactError for a setting of another type than `compile` writes, or a vast one."""
    kinds = {field.name: field.type for field in fields(CompilePlan)}
    for name, value in plan.items():
        texts = kinds[name] is str or (kinds[name] is Degrees and isinstance(value, str))
        kind = str if texts else bool if kinds[name] is bool else int
        most = _MOST_SLOTS if name == "max_concurrency" else _MOST_SIZE
        for one in (
            value if isinstance(value, list) and kinds[name] not in (bool, int, str) else [value]
        ):
            if type(one) is not kind or (isinstance(one, int) and one > most):
                raise ArtifactError(
                    f"{folder} has a plan with {name} {format_value(value)}, which compile does "
                    "not write. Compile into another folder."
                )


def _plan(
    folder: Path,
    model: Path,
    config: OmniConfig,
    targets: Mapping[str, Target],
    manifest_plan: Mapping[str, Any],
) -> CompilePlan:
    """Make the plan of a manifest, with the checks of a caller's settings."""
    manifest_plan = {name: value for name, value in manifest_plan.items() if name not in FORMER}
    if differing := sorted(SETTINGS.keys() ^ {*EARLIER, *manifest_plan}):
        raise ArtifactError(
            f"{folder} has a plan of another version: {printable(', '.join(differing), 200)} is "
            "missing or unknown. Compile into another folder."
        )
    _check_values(folder, manifest_plan)
    settings = {**EARLIER, **manifest_plan}
    name = settings.pop("target")
    target = targets.get(name) if isinstance(name, str) else None
    if target is None:
        raise ArtifactError(
            f"{folder} was compiled for target {format_value(name)}, and this version has "
            f"{', '.join(targets)}. Compile again for one of them."
        )
    try:
        return make_plan(model, config, target.limits, **settings)
    except (OptionError, TypeError) as error:
        raise ArtifactError(
            f"{folder} holds a plan that this version doesn't run ({error}). Compile again, or use "
            "the version that wrote it."
        ) from error
