"""Cutting tensors for ranks: pure functions with an inverse."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3_omni_neuron.graphs.parallel.heads import PAD, Units

Span = tuple[int, int]
"""(start, length) along an axis; start PAD: zeros."""


@dataclass(frozen=True)
class Cut:
    """An axis of a tensor, and for each rank its spans of that axis, in the rank's order.

    Every rank has the same length. Several ranks may have the same span; no span is left out.
    """

    axis: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> int:
        """Length of the axis at each rank."""
        return sum(length for _, length in self.spans[0])


Cuts = Mapping[str, Cut]
"""Cuts by parameter name; a parameter without one is whole at every rank."""


def rank_width(width: int, tp: int, multiple: int = 1) -> int:
    """Return the width of each of `tp` equal parts of `width`, rounded up to a multiple."""
    return -(-width // (tp * multiple)) * multiple


def cut_width(axis: int, blocks: Sequence[int], tp: int, multiple: int = 1) -> Cut:
    """Cut each of several blocks along an axis into equal parts.

    blocks: lengths, one after the other along the axis; gate and up are two blocks of one matrix.
    A part is a multiple of `multiple`; a block is padded with zeros at its end.
    """
    spans: list[list[Span]] = [[] for _ in range(tp)]
    offset = 0
    for block in blocks:
        each = rank_width(block, tp, multiple)
        for rank in range(tp):
            start = min(rank * each, block)
            real = min(each, block - start)
            spans[rank] += _spans((offset + start, real), (PAD, each - real))
        offset += block
    return Cut(axis, tuple(map(tuple, spans)))


def cut_heads(axis: int, head_dim: int, heads: Sequence[Units]) -> Cut:
    """Cut an axis of heads with head_dim entries each. heads: each rank's, counted on the axis."""
    return Cut(
        axis,
        tuple(
            tuple((unit if unit == PAD else unit * head_dim, head_dim) for unit in units)
            for units in heads
        ),
    )


def shard(tensor: Tensor, cut: Cut | None, rank: int) -> Tensor:
    """Return a rank's part of a tensor; the whole tensor without a cut."""
    if cut is None:
        return tensor
    shape = list(tensor.shape)
    parts = []
    for start, length in cut.spans[rank]:
        shape[cut.axis] = length
        parts.append(
            tensor.new_zeros(shape) if start == PAD else tensor.narrow(cut.axis, start, length)
        )
    return torch.cat(parts, cut.axis)


def unshard(shards: Sequence[Tensor], cut: Cut | None) -> Tensor:
    """Put the ranks' parts together: the inverse of `shard`."""
    if cut is None:
        return shards[0]
    shape = list(shards[0].shape)
    shape[cut.axis] = max(start + length for spans in cut.spans for start, length in spans)
    whole = shards[0].new_full(shape, float("nan"))
    for part, spans in zip(shards, cut.spans, strict=True):
        at = 0
        for start, length in spans:
            if start != PAD:
                piece = part.narrow(cut.axis, at, length)
                whole.narrow(cut.axis, start, length).copy_(piece)
            at += length
    return whole


def shard_state(state: Iterable[tuple[str, Tensor]], cuts: Cuts, rank: int) -> dict[str, Tensor]:
    """Cut every parameter of a module for one rank. state: names and parameters."""
    return {name: shard(tensor, cuts.get(name), rank) for name, tensor in state}


def _spans(*spans: Span) -> list[Span]:
    return [span for span in spans if span[1]]
