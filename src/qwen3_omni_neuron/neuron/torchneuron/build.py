"""Engines over a compiled tree's graphs, which run in a process per rank."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, load_tables
from qwen3_omni_neuron.compilation.plan import cores_of_stages
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.process.engine_process import EngineGroup
from qwen3_omni_neuron.engines.process.fork import finalize
from qwen3_omni_neuron.engines.protocols import StageEngines
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import EngineDiedError
from qwen3_omni_neuron.neuron.engines import NeuronVocoder, talker_engine, thinker_engine
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import LoadedPart, part_spec
from qwen3_omni_neuron.neuron.slots import GraphSlots, GraphThinkerSlots
from qwen3_omni_neuron.neuron.torchneuron.environment import settings
from qwen3_omni_neuron.neuron.torchneuron.runtime import Membership, Rank, TorchNeuron

READY_TIMEOUT_S = 600.0  # to import torch and join the ranks
LOAD_TIMEOUT_S = 3600.0  # to read a part's weights from a slow disk
FIRST_CALL_S = 1800.0  # a graph's first call captures it
HANGS_S = 60.0  # a busy host may delay later calls by seconds


def build_engines(
    spec: EngineSpec, stages: Sequence[str] = STAGES, runtime: TorchNeuron | None = None
) -> StageEngines:
    """Start a process for each rank, load the parts of some stages, and call every graph once.

    Raises NotInstalledError, ArtifactError for a tree whose graphs had to be compiled again,
    CheckpointError, EngineDiedError; everything is closed then.
    """
    built, config = StageEngines(), spec.config
    with ExitStack() as loaded:
        ranks = ModelRanks(spec, runtime or TorchNeuron(), stages)
        loaded.callback(ranks.close)
        if "thinker" in stages:
            built["thinker"] = _thinker(spec, ranks)
        if "talker" in stages and config.talker is not None:
            built["talker"] = _talker(spec, ranks)
        if "vocoder" in stages and config.code2wav is not None:
            part = ranks.part("code2wav")
            built["vocoder"] = NeuronVocoder(part, config.code2wav, ranks.opened(), ranks.fault)
        loaded.pop_all()
    return built


class ModelRanks:
    """The ranks of a model, each a process, until the last engine is closed."""

    def __init__(
        self,
        spec: EngineSpec,
        runtime: TorchNeuron,
        stages: Sequence[str] = STAGES,
        hangs_s: float = HANGS_S,
    ):
        """Start the processes and wait for them. hangs_s: see HANGS_S."""
        self._spec, self._engines = spec, 0
        self._hangs_s = hangs_s
        self._captured: set[str] = set()  # parts whose every graph was called
        folder = Path(tempfile.mkdtemp(prefix="qwen3-omni-neuron-"))
        self._delete = finalize(self, partial(shutil.rmtree, folder, ignore_errors=True))
        count = max(cores_of_stages(spec.plan.tp, stages).values())
        cores = os.environ.get("NEURON_RT_VISIBLE_CORES")
        factories, environments = [], []
        for rank in range(count):
            membership = Membership(rank, count, folder / "store")
            work = folder / f"rank{rank}"
            work.mkdir()
            factories.append(partial(Rank, spec, runtime, membership, work))
            environments.append(
                {
                    **settings(work, spec.plan.opt_level),
                    **membership.environment(cores),
                    "NEURON_LOGICAL_NC_CONFIG": str(spec.plan.lnc),
                }
            )
        names = [f"rank {rank} of {count}" for rank in range(count)]
        self._group = EngineGroup(names, factories, environments, threads=1)
        try:
            self._group.wait_ready(READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return self._group.pids

    def part(self, name: str) -> LoadedPart:
        """Load a part at its ranks and call each graph once. Raises ArtifactError."""
        spec = part_spec(self._spec.config, self._spec.plan, name)
        self._load("load", name)
        part = LoadedPart(spec.graphs, partial(self._run, name))
        self._captured.discard(name)
        part.warm_up()
        self._captured.add(name)
        return part

    def unload(self, part: LoadedPart) -> None:
        """Release a part's memory at its ranks."""
        self._load("unload", part.name)

    def opened(self) -> Callable[[], None]:
        """Count an engine. Returns the function that its `close` calls once."""
        self._engines += 1
        return self._release

    def fault(self) -> EngineDiedError | None:
        """Look at the processes; see engines.protocols.Fault."""
        return self._group.fault()

    def close(self) -> None:
        """End the processes."""
        self._group.close()
        self._delete()

    def _load(self, method: str, name: str) -> None:
        self._group.call(method, name, limit_s=LOAD_TIMEOUT_S, members=self._members(name))

    def _run(
        self, name: str, label: str, inputs: dict[str, Tensor], then: Graph | None = None
    ) -> Sequence[Tensor]:
        is_first, members = name not in self._captured, self._members(name)
        limit_s = FIRST_CALL_S if is_first else self._hangs_s
        following = (then.part, then.label) if then else ()
        outputs: Sequence[Tensor] = self._group.call(
            "run", name, label, inputs, *following, limit_s=limit_s, members=members
        )
        if is_first:  # a load must not compile them all to find that it may not
            self._group.call("check", name, label, limit_s=limit_s, members=members)
        return outputs

    def _members(self, name: str) -> int:
        # Each of the talker's cores takes the frame, and at degree 1 computes all of it.
        parts = ("talker", name) if name == "code_predictor" else (name,)
        return max(map(self._spec.plan.degree, parts))

    def _release(self) -> None:
        self._engines -= 1
        if self._engines == 0:
            self.close()


def _thinker(spec: EngineSpec, ranks: ModelRanks) -> ThinkerEngine:
    tables = load_tables(Checkpoint(spec.plan.model, spec.plan.adapters), spec.config, spec.dtype)
    assert tables.embedding is not None
    slots = GraphThinkerSlots(ranks.part("thinker"), tables.embedding.weight.detach())
    return thinker_engine(spec, slots, ranks.part, ranks.opened(), ranks.fault)


def _talker(spec: EngineSpec, ranks: ModelRanks) -> TalkerEngine:
    def slots() -> GraphSlots:
        return GraphSlots(ranks.part("talker"))

    return talker_engine(spec, slots, ranks.part, ranks.unload, ranks.opened(), ranks.fault)
