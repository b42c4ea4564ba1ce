"""The environment variables that TorchNeuron must have before it is imported, and its NEFF cache.

Source: aws-neuron/torch-neuronx v2.33.0, environment variables, backend, executor, NEFF cache.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from qwen3_omni_neuron.errors import ArtifactError, OptionError

# The compiler's flags for every graph, TorchNeuron v2.33.0's own. Its NEFF cache knows a graph by
# its flags: they stand in a tree's manifest beside the versions, and the level in its plan.
COMPILER_FLAGS: Mapping[str, str] = {
    "NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none",
}
OPT_LEVEL = "NEURON_COMPILER_OPT_LEVEL"
# A graph that fails must raise: if it ran on the CPU, benchmarks would be wrong.
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
CACHE_FOLDER = "TORCH_NEURONX_NEFF_CACHE_DIR"
LOCAL_CACHE_FOLDER = "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"
COMPILE_ONLY: Mapping[str, str] = {
    "TORCH_NEURONX_COMPILE_ONLY": "1",
    "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
}
NEFF_FOLDER = "neff"  # in a model's folder of the tree


def settings(neffs: Path, local: Path, opt_level: int | None) -> dict[str, str]:
    """Return the variables of a process. neffs: the cache folder; local: for copies."""
    folders = {CACHE_FOLDER: str(neffs), LOCAL_CACHE_FOLDER: str(local)}
    return {**SETTINGS, **folders, OPT_LEVEL: f"-O{opt_level}"}


def set_before_import(variables: Mapping[str, str]) -> None:
    """Put variables into this process's environment.

    Raises OptionError if one has another value, or torch_neuronx was imported without them.
    """
    different = {name: os.environ.get(name) for name in variables}
    different = {name: now for name, now in different.items() if now != variables[name]}
    for name, now in different.items():
        if now is not None:
            instead = ", and compile with --opt-level" if name == OPT_LEVEL else ""
            raise OptionError(
                f"{name} is {now!r}, and target torchneuron needs {variables[name]!r}. Unset it"
                f"{instead}."
            )
    if different and "torch_neuronx" in sys.modules:
        wanted = " ".join(f"{name}={variables[name]}" for name in different)
        raise OptionError(
            "torch_neuronx was imported before its settings were made. Start the process with "
            f"{wanted}."
        )
    os.environ.update(variables)


class NeffCache:
    """A process's folder of compiled graphs (NEFFs).

    TorchNeuron finds a NEFF by a hash of the captured graph. A load links a tree's files, and
    notices a graph that was compiled anew.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._restored: set[str] = set()

    def restore(self, source: Path) -> None:
        """Link all files below a folder of a tree. Raises ArtifactError if it has none."""
        files = [path for path in source.rglob("*") if path.is_file()]
        if not files:
            raise ArtifactError(f"{source} has no compiled graph. Compile again.")
        for path in files:
            link = self.folder / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(path.resolve())
        self._restored = self._files()

    def check(self, name: str) -> None:
        """Check that nothing was compiled since `restore`. Raises ArtifactError."""
        added = len(self._files() - self._restored)
        if added:
            raise ArtifactError(
                f"{added} graphs of {name} were compiled anew while they were loaded: the tree is "
                "of another compiler, or of another version of TorchNeuron. Compile it again."
            )

    def _files(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*.neff")}
