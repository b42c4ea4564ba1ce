"""One rank of a model: a process that has one core, and its share of every part."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.process.engine_group import StepCounts
from qwen3_omni_neuron.neuron.part import part_spec
from qwen3_omni_neuron.neuron.torchneuron.environment import (
    CACHE_FOLDER,
    NEFF_FOLDER,
    NeffCache,
    set_before_import,
    settings,
)
from qwen3_omni_neuron.neuron.torchneuron.graph import Compilations
from qwen3_omni_neuron.neuron.torchneuron.part import PartGraphs
from qwen3_omni_neuron.neuron.torchneuron.runtime import Membership, Runtime


def rank_progress(work: Path) -> StepCounts:
    """Return the step counts of a rank. work: the rank's folder."""
    return StepCounts(work / "progress")


def rank_settings(work: Path) -> dict[str, str]:
    """Return the environment variables of a rank's process. work: the rank's folder."""
    return settings(work / NEFF_FOLDER, work / "local")


class Rank:
    """The parts of a compiled tree at one rank. Ranks get the same calls in the same order.

    A part of degree N is at the first N ranks, and only these get its calls.

    work: this rank's own folder, for the NEFFs and its progress. A progress step begins when a
    graph's inputs are on the device; during a step the rank may wait for the other ranks.
    """

    fault = None

    def __init__(self, spec: EngineSpec, runtime: Runtime, membership: Membership, work: Path):
        """Begin to use the device. Raises OptionError, NotInstalledError."""
        assert spec.compiled is not None, "there is a tree to load from"
        self._spec, self._tree, self._membership = spec, spec.compiled, membership
        variables = rank_settings(work)
        set_before_import(variables)
        neffs = Path(variables[CACHE_FOLDER])
        neffs.mkdir(parents=True)
        self._cache = NeffCache(neffs)
        self._device = runtime.start(membership)
        self._parts: dict[str, PartGraphs] = {}
        self._progress = rank_progress(work)
        self.compilations = Compilations(self._progress.compiles)

    def load(self, name: str) -> None:
        """Put a part's weights and state on the core, and its NEFFs into the rank's cache folder.

        Raises ArtifactError for a tree that does not fit.
        """
        folder = self._tree / MODEL_OF_PART[name]
        self._cache.restore([folder / NEFF_FOLDER])
        self._parts[name] = PartGraphs(
            part_spec(self._spec.config, self._spec.plan, name),
            self._device,
            self.compilations,
            folder / name,
            self._membership.rank,
        )

    def settle(self, name: str) -> None:
        """Check that every graph of a part was found compiled, after each was called once.

        Raises ArtifactError where one was compiled anew.
        """
        self._cache.check(name)
        self.compilations.settle(self._parts[name].labels)

    def run(
        self, name: str, label: str, inputs: Mapping[str, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[str]]:
        """Run a graph of a part, as neuron.part.Run does.

        Returns the outputs, at rank 0 only, and the labels of graphs that were compiled too late.
        """
        outputs = self._parts[name].run(label, inputs, self._progress.step)
        return outputs if self._membership.rank == 0 else (), self.compilations.late

    def unload(self, name: str) -> None:
        """Release a part."""
        self._parts.pop(name, None)

    def close(self) -> None:
        """Release all parts."""
        self._parts.clear()
