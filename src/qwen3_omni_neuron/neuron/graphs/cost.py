"""The cost of one call of a graph, and its least time by the chip's published figures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from qwen3_omni_neuron.neuron.graphs.graph import Graph


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    physical_cores: number of cores, which share memory and engines evenly. lnc: physical cores in a
    logical core; elsewhere "core" means a logical core. memory_bytes, bytes_per_s (memory
    bandwidth), flops_per_s (bfloat16, dense): figures of the whole chip.
    """

    name: str
    physical_cores: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    lnc: int = 2

    @property
    def cores(self) -> int:
        """Number of logical cores."""
        return self.physical_cores // self.lnc

    @property
    def core_bytes(self) -> float:
        """Memory of a logical core."""
        return self.memory_bytes / self.cores

    def floor_s(self, flops: float, nbytes: float) -> float:
        """Return the least time for one core to compute `flops` and read `nbytes` at once."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s) * self.cores


# At LNC=2, the default: 4 logical cores of 24 GiB.
TRN2 = Chip("trn2", 8, 96 * 2**30, 2.9e12, 667e12)


WEIGHTS, STATE = "weights", "state"
RENEWALS = frozenset({"where"})  # reads its state whole, and writes it
GATHERS = frozenset({"index_select", "embedding", "index"})
SCATTERS = frozenset({"index_put", "index_copy", "index_add", "scatter", "scatter_add"})


@dataclass(frozen=True)
class Cost:
    """Cost of one call on one core.

    flops: operations of matrix products, convolutions and attention, including padding and masked
    positions. weight_bytes: weights read, each matrix as often as it is used; of experts and
    embeddings only the gathered rows count. state_bytes: state read, and written. sums: number of
    collectives over the ranks; sum_bytes: size of each rank's inputs to them. scattered: numbers
    that the compiler writes one by one.
    """

    flops: int
    weight_bytes: int
    state_bytes: int
    sums: int = 0
    sum_bytes: int = 0
    scattered: int = 0


class CountingGroup:
    """A neuron.graphs.parallel.layers.Group of `size` ranks that counts its collectives."""

    def __init__(self, size: int):
        self._size = size
        self.sums = self.sum_bytes = 0

    def sum(self, x: Tensor) -> Tensor:
        """Count a collective, and return x."""
        self._count(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Count a collective, and return x repeated once per rank along the last axis."""
        self._count(x)
        return torch.cat([x] * self._size, -1)

    def _count(self, x: Tensor) -> None:
        self.sums += 1
        self.sum_bytes += x.nbytes


def graph_cost(graph: Graph, owner: nn.Module, group: CountingGroup | None = None) -> Cost:
    """Count the cost of a graph over its part.

    owner: the part's module, on the meta device. group: the group that it was parallelized with.
    """
    before = (group.sums, group.sum_bytes) if group else (0, 0)
    example = graph.example(device="meta")
    reads = _Reads({WEIGHTS: owner.parameters(), STATE: example[len(graph.inputs) :]})
    with torch.no_grad(), FlopCounterMode(display=False) as flops, reads:
        graph.module(owner)(*example)
    after = (group.sums, group.sum_bytes) if group else (0, 0)
    sums, sum_bytes = (now - then for now, then in zip(after, before, strict=True))
    weight_bytes, state_bytes = reads.nbytes[WEIGHTS], reads.nbytes[STATE]
    return Cost(
        flops.get_total_flops(), weight_bytes, state_bytes, sums, sum_bytes, reads.scattered
    )


class _Reads(TorchDispatchMode):
    """Counter of the bytes that operations read from some tensors and from views on them.

    kinds: the tensors to watch, by kind. scattered: see Cost.
    """

    def __init__(self, kinds: Mapping[str, Iterable[Tensor]]):
        super().__init__()
        self.nbytes, self.scattered = dict.fromkeys(kinds, 0), 0
        # Keyed by id; the tensors are kept so that no other tensor gets the same id.
        self._watched = {id(t): (kind, t) for kind, tensors in kinds.items() for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given = tree_leaves((args, kwargs))
        if name in SCATTERS:
            self.scattered += max(a.numel() for a in given[1:] if isinstance(a, Tensor))
        read = [self._watched[id(leaf)] for leaf in given if id(leaf) in self._watched]
        if not read:
            return out
        kind = read[0][0]
        if any(returned.alias_info is not None for returned in func._schema.returns):
            self._watch(kind, out)
        elif name in RENEWALS and kind == STATE:
            self._watch(kind, out)
            self.nbytes[kind] += out.nbytes + sum(tensor.nbytes for _, tensor in read)
        elif name in GATHERS:
            self.nbytes[kind] += out.nbytes
        else:
            for kind, tensor in read:
                self.nbytes[kind] += tensor.nbytes
        return out

    def _watch(self, kind: str, out: Any) -> None:
        for tensor in tree_leaves(out):
            self._watched[id(tensor)] = (kind, tensor)
