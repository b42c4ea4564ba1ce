"""One rank's graphs of a part, over its share of the weights and its state."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from qwen3_omni_neuron.neuron.graphs.parallel.layers import Alone, Group
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import PartSpec, device_type
from qwen3_omni_neuron.neuron.shards import PartShare, read_part_shard
from qwen3_omni_neuron.neuron.torchneuron.graph import Compilations, CompiledGraph

# torch 2.13 calls it all_gather_single, and warns of the name that torch 2.9 has.
_all_gather = (
    collectives.all_gather_single
    if hasattr(collectives, "all_gather_single")
    else collectives.all_gather_tensor
)


class Collectives:
    """The first ranks as a neuron.graphs.parallel.layers.Group: collectives inside the graphs.

    They are functional collectives of torch.distributed, whose group of these ranks has to exist
    where a graph is called.
    """

    def __init__(self, ranks: int):
        self._ranks = list(range(ranks))

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors; see Group.sum."""
        return collectives.all_reduce(x, "sum", self._ranks)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last axis; see Group.gather."""
        # Gather along axis 0, which moves no data. Along another axis torch would split the result,
        # and the device turns a split into a gather of single numbers.
        ranks = _all_gather(x, 0, self._ranks).unflatten(0, (-1, len(x)))
        return ranks.movedim(0, -2).flatten(-2)  # [ranks, ..., n] -> [..., ranks * n]


def group_of(ranks: int) -> Group:
    """Return the group of a part's ranks."""
    return Alone() if ranks == 1 else Collectives(ranks)


class PartGraphs:
    """The compiled graphs of one part at one rank."""

    def __init__(
        self,
        spec: PartSpec,
        device: torch.device,
        compilations: Compilations,
        folder: Path | None = None,
        rank: int = 0,
    ):
        """Put weights and state on the device; nothing is compiled yet.

        folder: holds the part's weights, of which this rank's file is read; None: leave the weights
        uninitialized, for a compile. Raises ArtifactError for a file that does not fit the spec.
        """
        share = PartShare(spec, group_of(spec.tp))
        if folder is not None:
            share.load(read_part_shard(folder, rank, share.weights))
        weights, owner = Weights(share.owner, device), share.owner.to("meta")
        self._state = [
            torch.zeros(tensor.shape, dtype=device_type(tensor.dtype), device=device)
            for tensor in spec.state
        ]
        self._taken = {graph.label: len(graph.state) for graph in spec.graphs}
        self._graphs = {
            graph.label: CompiledGraph(graph, owner, weights, device, compilations)
            for graph in spec.graphs
        }

    def run(
        self,
        label: str,
        inputs: Mapping[str, Tensor],
        entering: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, ...]:
        """Run one graph, as neuron.part.Run does. entering: see CompiledGraph."""
        state = self._state[: self._taken[label]]
        return self._graphs[label](inputs, state, entering)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the graphs."""
        return tuple(self._graphs)
