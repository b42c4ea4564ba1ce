"""Files of the compiled graphs (NEFFs), in a tree and in TorchNeuron's cache.

TorchNeuron has no packaged model: each process captures a graph anew, and finds its NEFF in a
folder by a hash of the captured graph, as ab/cd/abcd....neff. A compile has TorchNeuron write that
folder into the tree. A load links the files to a folder of its own: a graph without a NEFF in the
tree adds one there, where it is noticed, and the tree stays unchanged.
"""

from collections.abc import Iterable
from pathlib import Path

from qwen3_omni_neuron.errors import ArtifactError

NEFF_FOLDER = "neff"  # in a model's folder of the tree


class NeffCache:
    """A process's folder of NEFFs. folder: exists; nothing else writes to it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._restored: set[str] = set()

    def restore(self, sources: Iterable[Path]) -> None:
        """Link all files below some folders of a tree.

        Raises ArtifactError where a folder has none.
        """
        for source in sources:
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
