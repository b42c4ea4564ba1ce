"""Layers sharded over ranks, and the group of ranks that they sum over.

Matrices are [in, out]. A rank has some outputs of a column-parallel matrix, or some inputs of a
row-parallel one, which sums over the ranks.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.moe import EXPERT_MATRICES, MoeFeedForward


class Group(Protocol):
    """The ranks over which a module is sharded."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, concatenated along the last axis."""
        ...


class Alone:
    """A group of one rank, or a placeholder if collectives don't matter."""

    def sum(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., in] times a matrix [in, out] in the type of x."""
    return x @ weight.to(x.dtype)


class ColumnParallel(nn.Module):
    """Matrix with some of the outputs at each rank.

    group: gathers the outputs; None: each rank keeps its own. whole: number of gathered outputs.
    """

    def __init__(self, into: int, out: int, bias: bool, group: Group | None = None, whole: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, out))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self._group, self._whole = group, whole

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] to [..., out], or [..., whole]."""
        y = product(x, self.weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y if self._group is None else self._group.gather(y)[..., : self._whole]


class RowParallel(nn.Module):
    """Matrix with some of the inputs at each rank. The bias is added once."""

    def __init__(self, into: int, out: int, bias: bool, group: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, out))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] and sum to [..., out]."""
        y = self._group.sum(product(x, self.weight))
        return y if self.bias is None else y + self.bias


class ParallelMoe(MoeFeedForward):
    """Mixture of experts with some columns of every expert at each rank, [experts, in, out].

    Routed and shared experts are summed in one collective.
    """

    def __init__(self, hidden_size: int, c: MoeConfig, group: Group):
        super().__init__(hidden_size, c)
        self._group = group
        for name in EXPERT_MATRICES:
            plain = self.get_parameter(name)
            setattr(self, name, nn.Parameter(plain.mT.contiguous(), plain.requires_grad))
        for layer in list(self.modules()):
            for name, child in list(layer.named_children()):
                if isinstance(child, nn.Linear):
                    into, out = child.in_features, child.out_features
                    setattr(layer, name, ColumnParallel(into, out, child.bias is not None))

    def matrices(self, name: str) -> Tensor:
        """Return the parameter; see MoeFeedForward.matrices."""
        matrices: Tensor = getattr(self, name)
        return matrices

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, hidden] to the same shape, and sum over ranks."""
        return self._group.sum(super().forward(x))
