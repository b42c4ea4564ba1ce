"""A part's weights on the device, joined in few tensors, each an input of every graph."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_ELEMENTS = 2**31 - 1  # per tensor: the device counts them in 32 bits
SMALL = 2**18
"""Elements below which weights of a type are joined, whatever their shapes."""


@dataclass(frozen=True)
class Place:
    """Position of a weight: row `start` of a tensor, or element of a flat one."""

    tensor: int
    start: int
    shape: torch.Size
    flat: bool

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the weight, a contiguous view of one of the tensors."""
        held = tensors[self.tensor]
        if not self.flat:
            return held[self.start]
        piece = held.narrow(0, self.start, self.shape.numel())
        return piece if len(self.shape) == 1 else piece.view(self.shape)


class Weights:
    """Parameters and constants of a part's module, joined by shape and type."""

    def __init__(self, owner: nn.Module, device: torch.device):
        """Copy the weights; those on the meta device stay uninitialised."""
        self.tensors: list[Tensor] = []
        self._places: dict[str, Place] = {}
        alike: dict[tuple[torch.Size, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
        small: dict[torch.dtype, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            alike[tensor.shape, tensor.dtype].append((name, tensor))
        for (shape, dtype), named in alike.items():
            if shape.numel() < SMALL:
                small[dtype] += named
                continue
            parts = math.ceil(len(named) / max(1, MOST_ELEMENTS // shape.numel()))
            rows = math.ceil(len(named) / parts)
            for begin in range(0, len(named), rows):
                self._join(named[begin : begin + rows], device)
        for named in small.values():
            self._join_flat(named, device)

    def views(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return every weight by its name in the module."""
        return {name: place.view(tensors) for name, place in self._places.items()}

    def tensors_of(self, names: Iterable[str]) -> set[int]:
        """Return the indices of the tensors with these weights."""
        return {self._places[name].tensor for name in names}

    def _join(self, named: Sequence[tuple[str, Tensor]], device: torch.device) -> None:
        (_, first), *_ = named
        joined = torch.empty((len(named), *first.shape), dtype=first.dtype, device=device)
        for row, (name, tensor) in enumerate(named):
            if not tensor.is_meta:
                joined[row].copy_(tensor.detach())
            self._places[name] = Place(len(self.tensors), row, tensor.shape, False)
        self.tensors.append(joined)

    def _join_flat(self, named: Sequence[tuple[str, Tensor]], device: torch.device) -> None:
        (_, first), *_ = named
        total = sum(tensor.numel() for _, tensor in named)
        joined, begin = torch.empty(total, dtype=first.dtype, device=device), 0
        for name, tensor in named:
            place = Place(len(self.tensors), begin, tensor.shape, True)
            if not tensor.is_meta:
                place.view((*self.tensors, joined)).copy_(tensor.detach())
            self._places[name] = place
            begin += tensor.numel()
        self.tensors.append(joined)
