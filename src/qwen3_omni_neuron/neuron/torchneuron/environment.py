"""Environment variables that TorchNeuron needs before its import, and its caches.

Source: aws-neuron/torch-neuronx v2.33.0, environment variables, backend, executor, NEFF cache. The
caches of HLO and NKI: longdct/vllm-neuron and aws-neuron/vllm-omni-neuron.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from qwen3_omni_neuron.errors import ArtifactError, OptionError

# TorchNeuron v2.33.0's own compiler flags for every graph. Its NEFF cache identifies a graph by its
# flags: they are in a tree's manifest beside the versions, and the level in its plan.
COMPILER_FLAGS: Mapping[str, str] = {"NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none"}
OPT_LEVEL = "NEURON_COMPILER_OPT_LEVEL"
# A graph that fails must raise: on the CPU, it would falsify benchmarks.
SETTINGS: Mapping[str, str] = {
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
    # A failing operation is not repeated on the CPU.
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
    # A tensor on the CPU is not copied at every call.
    "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": "1",
    # Nor is state that is renewed in place copied back.
    "TORCH_NEURONX_RETAIN_DEVICE_MODE": "0",
    # NEFFs come from the tree.
    "TORCH_NEURONX_DISABLE_NEFF_CACHE": "0",
    "TORCH_NEURONX_NEFF_DISABLE_CACHE": "0",
    **COMPILER_FLAGS,
}
NEFF_FOLDER = "neff"
# A model's folders in the tree with the files for a load, by the variables that name each rank's.
# Defaults are in a home or temporary folder, which may be empty at a load.
CACHES: Mapping[str, str] = {
    "TORCH_NEURONX_NEFF_CACHE_DIR": NEFF_FOLDER,
    "TORCH_NEURONX_HLO_CACHE_DIR": "hlo",
    "NKI_COMPILE_CACHE_URL": "nki",
    "NKI_TRACE_CACHE_URL": "nki_trace",
}
LOCAL_CACHE_FOLDER = "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"
COMPILE_ONLY: Mapping[str, str] = {
    "TORCH_NEURONX_COMPILE_ONLY": "1",
    "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
}
LOCAL_FOLDER = "local"  # for TorchNeuron's own copies


def settings(folder: Path, opt_level: int | None) -> dict[str, str]:
    """Return the variables of a process with its caches in a folder."""
    names = {**CACHES, LOCAL_CACHE_FOLDER: LOCAL_FOLDER}
    folders = {variable: str(folder / name) for variable, name in names.items()}
    return {**SETTINGS, **folders, OPT_LEVEL: f"-O{opt_level}"}


def set_before_import(variables: Mapping[str, str]) -> None:
    """Set this process's environment variables.

    Raises OptionError if one has another value, or torch_neuronx was imported before.
    """
    different = {name: os.environ.get(name) for name in variables}
    different = {name: now for name, now in different.items() if now != variables[name]}
    for name, now in different.items():
        if now is not None:
            instead = ", and compile with --opt-level" if name == OPT_LEVEL else ""
            raise OptionError(
                f"{name} is {now!r}, but target torchneuron needs {variables[name]!r}. Unset it"
                f"{instead}."
            )
    if different and "torch_neuronx" in sys.modules:
        wanted = " ".join(f"{name}={variables[name]}" for name in different)
        raise OptionError(
            "torch_neuronx was imported before its settings were set. Start the process with "
            f"{wanted}."
        )
    os.environ.update(variables)


class GraphCaches:
    """A process's folders of compiled graphs (NEFFs), of their HLO, and of NKI's kernels.

    TorchNeuron finds a graph by the hash of its capture. A load links the tree's files, and detects
    new compiles.
    """

    def __init__(self, folder: Path):
        self._folders = {name: folder / name for name in CACHES.values()}
        for each in self._folders.values():
            each.mkdir(parents=True)
        self._restored: set[Path] = set()

    def restore(self, source: Path) -> None:
        """Link all files of a tree's model, `source`. Raises ArtifactError without a NEFF."""
        for name, folder in self._folders.items():
            files = [path for path in (source / name).rglob("*") if path.is_file()]
            if not files and name == NEFF_FOLDER:
                raise ArtifactError(f"{source / name} has no compiled graph. Compile again.")
            for path in files:
                link = folder / path.relative_to(source / name)
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(path.resolve())
        self._restored = self._files()

    def check(self, label: str, source: Path) -> None:
        """Raise ArtifactError if something was compiled since `restore`, for a graph's call."""
        added = sorted(self._files() - self._restored)
        if added:
            raise ArtifactError(
                f"{label} was compiled again at load ({len(added)} files, {added[0]} first): "
                f"TorchNeuron does not find it in the tree. Delete {source} and compile again, "
                "which skips the rest."
            )

    def _files(self) -> set[Path]:
        files = (path for folder in self._folders.values() for path in folder.rglob("*"))
        return {path for path in files if path.is_file() and path.suffix != ".lock"}
