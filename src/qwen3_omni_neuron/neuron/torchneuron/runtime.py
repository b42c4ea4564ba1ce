"""The ranks of a model over TorchNeuron, a process per core, and their compile.

Source: aws-neuron/torch-neuronx v2.33.0, torch_neuronx/distributed/backend.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names
from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART, MODEL_PARTS, MODEL_STAGES, CompilePlan
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.errors import CompileError
from qwen3_omni_neuron.neuron.graphs.all import graph_records
from qwen3_omni_neuron.neuron.graphs.graph import Outputs
from qwen3_omni_neuron.neuron.part import part_spec, to_device_type
from qwen3_omni_neuron.neuron.shards import part_shard_bytes, write_part_shards
from qwen3_omni_neuron.neuron.torchneuron.environment import (
    NEFF_FOLDER,
    GraphCaches,
    set_before_import,
    settings,
)
from qwen3_omni_neuron.neuron.torchneuron.graph import Following, PartGraphs
from qwen3_omni_neuron.neuron.versions import require_torchneuron


@dataclass(frozen=True)
class Membership:
    """Membership of a process in the group of ranks: its number, theirs, and their store's file."""

    rank: int
    ranks: int
    store: Path

    def environment(self, visible_cores: str | None) -> dict[str, str]:
        """Return the rank's variables, with torchrun's. visible_cores: all ranks', e.g. "8-15"."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",  # address of Neuron's own store; rank 0 chooses its port
        }
        if visible_cores is not None:
            first = int(visible_cores.split("-")[0])
            variables["NEURON_RT_VISIBLE_CORES"] = str(first + self.rank)
        return variables

    def join(self, backend: str) -> None:
        """Create torch.distributed's default group of all ranks."""
        if self.ranks > 1:
            store = distributed.FileStore(str(self.store), self.ranks)
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.ranks
            )


class TorchNeuron:
    """Picklable access to a device."""

    def start(self, membership: Membership) -> torch.device:
        """Join the ranks over Neuron's collectives, and acquire the rank's core."""
        require_torchneuron()
        import torch_neuronx  # noqa: F401, registers device and backend

        membership.join("neuron")
        # With several ranks a process sees one core, numbered by the rank.
        torch.neuron.set_device(membership.rank)  # type: ignore[attr-defined]
        return torch.device("neuron", membership.rank)

    def start_compiling(self, ranks: int) -> torch.device:
        """Begin to compile for rank 0, without a device."""
        require_torchneuron()
        import torch_neuronx  # noqa: F401, registers device and backend

        make_fake_group(ranks)
        return torch.device("neuron", 0)

    def synchronise(self) -> None:
        """Wait for all started work, compiles included, and raise its errors."""
        torch.neuron.synchronize()  # type: ignore[attr-defined]


def make_fake_group(ranks: int) -> None:
    """Create a default group whose collectives do nothing."""
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


class Rank:
    """A compiled tree's parts at one rank. Ranks get the same calls in the same order.

    work: this rank's folder, for its caches.
    """

    fault = None

    def __init__(self, spec: EngineSpec, runtime: TorchNeuron, membership: Membership, work: Path):
        """Initialise the device. Raises OptionError, NotInstalledError."""
        assert spec.compiled is not None, "needs a tree"
        self._spec, self._tree, self._membership = spec, spec.compiled, membership
        set_before_import(settings(work, spec.plan.opt_level))
        self._caches = GraphCaches(work)
        self._device = runtime.start(membership)
        self._parts: dict[str, PartGraphs] = {}

    def load(self, name: str) -> None:
        """Put a part's weights and state on the core. Raises ArtifactError."""
        folder = self._tree / MODEL_OF_PART[name]
        self._caches.restore(folder)
        self._parts[name] = PartGraphs(
            part_spec(self._spec.config, self._spec.plan, name),
            self._device,
            folder / name,
            self._membership.rank % self._spec.plan.degree(name),
        )

    def check(self, name: str, label: str) -> None:
        """Raise ArtifactError if a part's graph was compiled again."""
        self._caches.check(label, self._tree / MODEL_OF_PART[name])

    def run(self, name: str, label: str, inputs: Mapping[str, Tensor], *then: str) -> Outputs:
        """Run a part's graph, then another's, by part and label. Returns rank 0's outputs."""
        following = list[Following]()
        if then and then[0] in self._parts:  # else it has fewer ranks
            following.append(self._parts[then[0]].graph(then[1]))
        outputs = self._parts[name].run(label, inputs, *following)
        return outputs if self._membership.rank == 0 else ()

    def unload(self, name: str) -> None:
        """Release a part."""
        self._parts.pop(name, None)

    def close(self) -> None:
        """Release all parts."""
        self._parts.clear()


def fill_folder(
    plan: CompilePlan, model: str, folder: Path, runtime: TorchNeuron | None
) -> tuple[GraphRecord, ...]:
    """Compile a model's parts into `folder`, which has the caches' empty folders.

    All ranks run the same graphs: only rank 0's are compiled, without a device, into TorchNeuron's
    caches, and PART/weights, a file per rank. Raises CheckpointError, CompileError, OSError,
    NotInstalledError.
    """
    config, checkpoint = read_config(plan.model), Checkpoint(plan.model, plan.adapters)
    # Check names before hours of compiling.
    check_names(list(lay_out(config, (MODEL_STAGES[model],))[1].values()), checkpoint)
    runtime, compiled = runtime or TorchNeuron(), set[object]()
    device = runtime.start_compiling(plan.tp.of(model))
    for name in MODEL_PARTS[model]:
        spec = part_spec(config, plan, name)
        (folder / name).mkdir()
        write_part_shards(spec, checkpoint, folder / name)
        part = PartGraphs(spec, device)
        runtime.synchronise()  # so that the copies' NEFFs don't count for the first graph
        for graph in spec.graphs:
            inputs = {tensor.name: to_device_type(tensor.idle_input()) for tensor in graph.inputs}
            before, kind = _neffs(folder), part.graph(graph.label)[0].kind
            try:
                part.run(graph.label, inputs)
                runtime.synchronise()  # a call may return before its compile is done
                if _neffs(folder) == before and kind not in compiled:
                    raise CompileError("its call left no NEFF")
            except Exception as error:
                raise CompileError(
                    f"{graph.label} was not compiled: {error}. Set TORCH_NEURONX_DEBUG_DIR and "
                    "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS=1 to keep its inputs."
                    # neuronx-cc's error F137
                    f"{plan.if_killed if 'killed' in str(error) else ''}"
                ) from error
            compiled.add(kind)
    return graph_records(config, plan, model)


def expected_bytes(plan: CompilePlan, model: str) -> int:
    """Return the bytes of a model's weights, without NEFFs."""
    config = read_config(plan.model)
    return sum(part_shard_bytes(part_spec(config, plan, name)) for name in MODEL_PARTS[model])


def _neffs(folder: Path) -> int:
    return sum(1 for _ in (folder / NEFF_FOLDER).rglob("*.neff"))
