"""Cutting whole modules for ranks, and putting the ranks' parts together again."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from qwen3_omni_neuron.neuron.graphs.cut import PAD, Cut, Cuts, shard


def unshard(shards: Sequence[Tensor], cut: Cut | None) -> Tensor:
    """Put the ranks' parts together: the inverse of `shard`."""
    if cut is None:
        return shards[0]
    if cut.transposed:
        shards = [part.transpose(-1, -2) for part in shards]
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
