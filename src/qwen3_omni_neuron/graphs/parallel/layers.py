"""The layers that several cores hold together, and the group they sum over.

A column-parallel matrix gives each rank some of its outputs, a row-parallel one takes those as
some of its inputs and sums: one sum for the two.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.moe import MoeFeedForward


class Group(Protocol):
    """The ranks that hold a module together. On Neuron its collectives, in a test threads."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, at every rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, one after the other along the last axis, at every rank."""
        ...


class Alone:
    """A group of one, or one rank's graph where its collectives don't matter: cost, lint."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


class ColumnParallel(nn.Module):
    """Some outputs of a matrix. whole: how many it has in all ranks, where they are gathered."""

    def __init__(self, into: int, out: int, bias: bool, group: Group | None = None, whole: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self._group, self._whole = group, whole

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out], or [..., whole]."""
        y = F.linear(x, self.weight, self.bias)
        return y if self._group is None else self._group.gather(y)[..., : self._whole]


class RowParallel(nn.Module):
    """Some inputs of a matrix, and the sum over all of them. The bias is added once."""

    def __init__(self, into: int, out: int, bias: bool, group: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in at this rank] -> [..., out]."""
        y = self._group.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x)."""
        return residual + self(x)


class ParallelMoe(MoeFeedForward):
    """Some columns of every expert; the router, whole, chooses alike at every rank.

    Routed and shared experts are summed together, once.
    """

    def __init__(self, hidden_size: int, c: MoeConfig, group: Group):
        super().__init__(hidden_size, c)
        self._group = group

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self._group.sum(super().add_to(torch.zeros_like(residual), x))
