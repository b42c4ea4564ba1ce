"""Cutting tensors for ranks: each rank's heads, columns and experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3_omni_neuron.errors import OptionError

PAD = -1
"""Index that stands for a head of zeros."""

Units = tuple[int, ...]


def query_heads(heads: int, kv_heads: int, tp: int) -> list[Units]:
    """Return the query heads of each rank, padded with PAD to the same number.

    20 with a KV head each at TP 8 become 24. A KV head's query heads are spread over the ranks that
    share it: 4 and 2 KV heads at TP 8 are (0), (1), (PAD), (PAD), (2), (3), (PAD), (PAD).
    Raises OptionError if KV heads and ranks don't divide.
    """
    if heads == kv_heads:
        return _split(tuple(range(heads)), tp)
    group, sharing = heads // kv_heads, _sharing(kv_heads, tp)
    if sharing == 1:
        return _split(tuple(range(heads)), tp)
    return [
        units
        for kv in range(kv_heads)
        for units in _split(tuple(range(kv * group, (kv + 1) * group)), sharing)
    ]


def key_heads(heads: int, kv_heads: int, tp: int) -> list[Units]:
    """Return the KV heads that each rank's query heads read."""
    if heads == kv_heads:
        return _split(tuple(range(heads)), tp)
    sharing = _sharing(kv_heads, tp)
    if sharing == 1:
        return _split(tuple(range(kv_heads)), tp)
    return [(rank // sharing,) for rank in range(tp)]


def local_kv_heads(heads: int, kv_heads: int, tp: int) -> int:
    """Return the number of KV heads per rank."""
    return len(key_heads(heads, kv_heads, tp)[0])


def _sharing(kv_heads: int, tp: int) -> int:
    if kv_heads % tp and tp % kv_heads:
        raise OptionError(
            f"{kv_heads} KV heads can't be held by {tp} cores: one number must divide the other. "
            "Choose another TP degree."
        )
    return max(1, tp // kv_heads)


def _split(units: Units, parts: int) -> list[Units]:
    each = -(-len(units) // parts)
    padded = units + (PAD,) * (each * parts - len(units))
    return [padded[i * each : (i + 1) * each] for i in range(parts)]


Span = tuple[int, int]
"""(start, length) along an axis; start PAD: zeros."""


@dataclass(frozen=True)
class Cut:
    """An axis along which a tensor is cut, and each rank's spans.

    transposed: a rank's tensor has its last two axes exchanged.
    """

    axis: int
    spans: tuple[tuple[Span, ...], ...]
    transposed: bool = False

    @property
    def length(self) -> int:
        """Length of the axis at each rank."""
        return sum(length for _, length in self.spans[0])


Cuts = Mapping[str, Cut]
"""Cuts by parameter name; a parameter without a cut is whole at every rank."""


def rank_width(width: int, tp: int) -> int:
    """Return the width of each of `tp` equal parts of `width`, rounded up."""
    return -(-width // tp)


def cut_width(axis: int, blocks: Sequence[int], tp: int) -> Cut:
    """Cut each block along an axis into equal parts, padded at their ends."""
    spans: list[list[Span]] = [[] for _ in range(tp)]
    offset = 0
    for block in blocks:
        each = rank_width(block, tp)
        for rank in range(tp):
            start = min(rank * each, block)
            real = min(each, block - start)
            spans[rank] += _spans((offset + start, real), (PAD, each - real))
        offset += block
    return Cut(axis, tuple(map(tuple, spans)))


def whole(axis: int, length: int, tp: int) -> Cut:
    """Leave an axis whole at every rank."""
    return Cut(axis, (((0, length),),) * tp)


def cut_heads(axis: int, head_dim: int, heads: Sequence[Units]) -> Cut:
    """Cut an axis of heads with head_dim entries each. heads: each rank's head indices."""
    return Cut(
        axis,
        tuple(
            tuple((unit if unit == PAD else unit * head_dim, head_dim) for unit in units)
            for units in heads
        ),
    )


def shard(tensor: Tensor, cut: Cut | None, rank: int) -> Tensor:
    """Return a rank's part of a tensor, contiguous."""
    if cut is None:
        return tensor
    shape = list(tensor.shape)
    parts = []
    for start, length in cut.spans[rank]:
        shape[cut.axis] = length
        parts.append(
            tensor.new_zeros(shape) if start == PAD else tensor.narrow(cut.axis, start, length)
        )
    part = torch.cat(parts, cut.axis)
    return part.transpose(-1, -2).contiguous() if cut.transposed else part


def _spans(*spans: Span) -> list[Span]:
    return [span for span in spans if span[1]]
