"""KV caches: where a decoder stores keys and values, and what its new rows attend to.

A slot is one row of a cache: the keys and values of one conversation. Decoder layers know a cache
as `Appendable`. Its classes differ in what a call fills and where the result goes: an engine on the
CPU writes in place, a graph for Neuron takes its state as inputs and returns it as outputs.

    class             one call is                  keys and values are     used by
    PromptCache       prefill of one slot          a KvCache, in place     cpu.eager
    SlotCache         a decode step of some slots  a KvCache, in place     cpu.eager
    PromptState       prefill of one slot          inputs and outputs      neuron.graphs.decoders
    StepState         a decode step of some slots  inputs and outputs      neuron.graphs.decoders
    FrameCache        a code predictor step        its own, for one frame  model.code_predictor
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.model.config import DecoderConfig


class Appendable(Protocol):
    """KV cache as a decoder layer sees it."""

    @property
    def mask(self) -> Tensor | None:
        """Mask, bool [slots, 1, T, window]: True for keys that the new positions must not see.

        None where each new position sees all keys up to its own: T is 1, or no earlier keys exist.
        """

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions' keys and values; return all that the new positions attend to.

        keys, values: [slots, kv_heads, T, head_dim]. Returns [slots, kv_heads, window, head_dim]
        each.
        """


@dataclass(frozen=True)
class KvCache:
    """Keys and values [layers, slots, kv_heads, positions, head_dim].

    `slots` and `window` are views of the same memory.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def zeros(config: DecoderConfig, slots: int, positions: int, dtype: torch.dtype) -> "KvCache":
        """Create an empty cache, of zeros: a masked position's values still count, times 0."""
        shape = (config.layers, slots, config.kv_heads, positions, config.head_dim)
        return KvCache(lazy_zeros(shape, dtype), lazy_zeros(shape, dtype))

    def slots(self, start: int, stop: int) -> "KvCache":
        """Return the slots from `start` up to `stop`."""
        return KvCache(self.keys[:, start:stop], self.values[:, start:stop])

    def window(self, positions: int) -> "KvCache":
        """Return the first `positions` of every slot."""
        return KvCache(self.keys[..., :positions, :], self.values[..., :positions, :])


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory only where they are written, a small page at a time."""
    # torch.zeros writes all of it now, and numpy's zeros come in pages of 2 MB: the first row of
    # each head would take one, and the time to fill it.
    # A forked process has its own copy of the rows, as of any other tensor.
    own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, **own)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)


class PromptCache:
    """Prefill in place: rows of a prompt fill one slot from position `start` on.

    They see the first `start` positions and each other, in the cache's dtype. cache: the cache of
    that slot alone; with a `start`, its window that ends with the last new row. Positions after the
    rows keep their values.
    """

    def __init__(self, cache: KvCache, start: int = 0):
        self._cache, self._start = cache, start
        self.mask: Tensor | None = None
        if start:
            positions = torch.arange(cache.keys.shape[3])
            self.mask = (positions > positions[start:, None])[None, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the positions from `start` on; see Appendable.append."""
        stop = self._start + keys.shape[2]
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        cached_keys[:, :, self._start : stop] = keys
        cached_values[:, :, self._start : stop] = values
        if not self._start and cached_keys.dtype == keys.dtype:
            return keys, values
        return cached_keys[:, :, :stop].to(keys.dtype), cached_values[:, :, :stop].to(keys.dtype)


class SlotCache:
    """Decode in several slots, in place: one row each, written at that slot's own position.

    cache: all slots, with the window that ends at the longest slot's new row. slots: int64 [n],
    indices of the slots in use. lengths: int64 [n], the positions that the new rows are written to.
    """

    def __init__(self, cache: KvCache, slots: Tensor, lengths: Tensor):
        self._cache, self._slots, self._lengths = cache, slots, lengths
        positions = torch.arange(cache.keys.shape[3])
        self.mask = (positions > lengths[:, None])[:, None, None, :]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position a slot; see Appendable.append."""
        return (
            self._put(self._cache.keys[layer], keys),
            self._put(self._cache.values[layer], values),
        )

    def _put(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n, kv_heads, 1, head_dim] into cache [slots, kv_heads, window, head_dim].

        Returns [n, kv_heads, window, head_dim] of the slots in use.
        """
        cache[self._slots, :, self._lengths] = rows.squeeze(2).to(cache.dtype)
        return cache.index_select(0, self._slots).to(rows.dtype)


Bank = tuple[Tensor, ...]
"""Some slots of a graph's KV cache, in segments of their positions: the first, or all of them.

Each is [slots, 2 layers, kv_heads, positions, head_dim]: keys of layer 0, values of layer 0, keys
of layer 1, ... A graph renews each segment that it takes by one operation that reads and writes it
whole, since a scatter would write number by number, and the compiler may copy the tensor all the
same. So a call takes the banks of its own slots, and no more segments than the positions that it
reads.
"""


def one_hot(slot: Tensor, slots: int) -> Tensor:
    """Return bool [slots, 1, 1, 1, 1], True for one of them. slot: integer [1]."""
    numbers = torch.arange(slots, dtype=slot.dtype, device=slot.device)
    return (numbers == slot).view(-1, 1, 1, 1, 1)


def rows_by_slot(named: Tensor, slots: int, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return which row each slot gets, integer [slots], and which slots get one, bool [slots].

    named: the slot of each row, integer [n]. valid: bool [n], rows that are given to their slot; of
    one slot at most one.
    """
    numbers = torch.arange(slots, dtype=named.dtype, device=named.device)
    matches = (named[:, None] == numbers) & valid[:, None]  # [n, slots]
    rows = torch.arange(len(named), dtype=named.dtype, device=named.device)
    return torch.where(matches, rows[:, None], 0).amax(0), matches.any(0)


class GraphCache(ABC):
    """KV cache of a graph: banks of slots as inputs and outputs.

    slots: integer [n], the slot of each prompt or row, counted through the banks, or their number
    for an idle row; None where they are all slots of the banks, in order, so that none has to be
    looked up.
    """

    mask: Tensor | None = None

    def __init__(self, banks: Sequence[Bank], slots: Tensor | None):
        self._banks = banks
        self._held = _taken(banks, slots)
        self._new: list[Tensor] = []

    @abstractmethod
    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See Appendable.append. Layers append in their order."""

    @abstractmethod
    def _renewal(self) -> tuple[Tensor, Tensor]:
        """Return which positions of each slot are new, and what they are.

        bool [slots or 1, 1, 1, window or 1, 1]; [slots or 1, 2 layers, kv_heads, window or 1,
        head_dim].
        """

    @property
    def new_state(self) -> tuple[Tensor, ...]:
        """The segments of the banks after the call, when every layer has appended."""
        renewed, first = [], 0
        is_new, new = self._renewal()
        for bank in self._banks:
            last, begin = first + len(bank[0]), 0
            for segment in bank:
                end = begin + segment.shape[3]
                flags, values = (_part(t, first, last, begin, end) for t in (is_new, new))
                renewed.append(torch.where(flags, values, segment))
                begin = end
            first = last
        return tuple(renewed)

    @property
    def _slots(self) -> int:
        return sum(len(bank[0]) for bank in self._banks)


def _taken(banks: Sequence[Bank], slots: Tensor | None) -> Tensor:
    """Return some slots of banks, [n, 2 layers, kv_heads, positions, head_dim]."""
    segments = [_joined(tensors, 0) for tensors in zip(*banks, strict=True)]
    if slots is not None:
        slots = slots.clamp(max=len(segments[0]) - 1)
        segments = [segment.index_select(0, slots) for segment in segments]
    return _joined(segments, 3)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), axis)


def _part(x: Tensor, first: int, last: int, begin: int, end: int) -> Tensor:
    """Return some slots and positions of x [slots or 1, ..., positions or 1, n]."""
    if len(x) > 1:
        x = x[first:last]
    return x[:, :, :, begin:end] if x.shape[3] > 1 else x


class PromptState(GraphCache):
    """Prefill in a graph: rows of a prompt fill one slot from position `length` on.

    They see the first `length` positions and each other. length, last: integer [1]; rows after
    `last` are padding, which is written nowhere. rows: number of rows with padding. length + last
    is below the banks' number of positions, all of which are read. The slot's entries after the
    last row are kept, but read as zeros, so that they may have any value.
    """

    def __init__(
        self,
        banks: Sequence[Bank],
        slot: Tensor | None,
        length: Tensor,
        last: Tensor,
        rows: int,
    ):
        super().__init__(banks, slot)
        self._slot = slot
        kind, device, window = length.dtype, length.device, self._held.shape[3]
        row, positions = (torch.arange(n, dtype=kind, device=device) for n in (rows, window))
        self._is_row = (row <= last)[:, None]
        self._places = positions[:, None] == length + row  # [window, rows]
        self._is_new = ((positions >= length) & (positions <= length + last))[:, None]
        self._is_unused = (positions > length + last)[:, None]
        self.mask = (positions > (length + row)[:, None])[None, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows; see Appendable.append. keys, values: [1, kv_heads, rows, head_dim]."""
        return self._put(2 * layer, keys), self._put(2 * layer + 1, values)

    def _put(self, index: int, rows: Tensor) -> Tensor:
        """Return [1, kv_heads, window, head_dim] of the slot with these rows."""
        # A product with ones and zeros: it moves the rows together, and exactly.
        placed = self._places.to(rows.dtype) @ torch.where(self._is_row, rows, 0)
        self._new.append(placed)
        read = torch.where(self._is_new, placed, self._held[:, index])
        return read.masked_fill(self._is_unused, 0)

    def _renewal(self) -> tuple[Tensor, Tensor]:
        is_new = self._is_new[None, None, None]
        if self._slot is not None:
            is_new = is_new & one_hot(self._slot, self._slots)
        return is_new, torch.stack(self._new, 1)


class StepState(GraphCache):
    """Decode in a graph: one row a slot, written at that slot's own position.

    lengths: integer [n], the positions that the new rows are written to, or -1 for an idle row: it
    leaves its slot unchanged and reads position 0, so that its result is a number, which the caller
    ignores. Every length is below the banks' number of positions, all of which are read.
    """

    def __init__(self, banks: Sequence[Bank], slots: Tensor | None, lengths: Tensor):
        super().__init__(banks, slots)
        window = self._held.shape[3]
        positions = torch.arange(window, dtype=lengths.dtype, device=lengths.device)
        self._named, self._lengths, self._positions = slots, lengths, positions
        self._is_at = (positions == lengths[:, None])[:, None, :, None]  # [n, 1, window, 1]
        self.mask = (positions > lengths.clamp(min=0)[:, None])[:, None, None, :]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position a slot; see Appendable.append. keys, values: T is 1."""
        self._new += [keys, values]
        return self._read(2 * layer, keys), self._read(2 * layer + 1, values)

    def _read(self, index: int, rows: Tensor) -> Tensor:
        """Return [n, kv_heads, window, head_dim] of the slots with these rows."""
        return torch.where(self._is_at, rows, self._held[:, index])

    def _renewal(self) -> tuple[Tensor, Tensor]:
        is_new, rows = self._is_at[:, None], torch.stack(self._new, 1)
        if self._named is None:
            return is_new, rows
        row, is_named = rows_by_slot(self._named, self._slots, self._named < self._slots)
        is_new = self._positions == self._lengths.index_select(0, row)[:, None]
        is_new = is_new & is_named[:, None]  # [slots, window]
        return is_new.unflatten(0, (-1, 1, 1)).unsqueeze(4), rows.index_select(0, row)


@dataclass
class FrameCache:
    """Cache of the code predictor: at most 16 positions, the same in all slots, for one frame."""

    mask = None
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions after those that the cache holds; see Appendable.append."""
        if layer in self._held:
            cached_keys, cached_values = self._held[layer]
            keys = torch.cat((cached_keys, keys), 2)
            values = torch.cat((cached_values, values), 2)
        self._held[layer] = keys, values
        return keys, values
