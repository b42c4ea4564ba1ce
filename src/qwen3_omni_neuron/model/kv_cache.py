"""KV caches: storage of a decoder's keys and values, and the keys that new rows attend to.

A slot is a cache's row for one conversation. Decoder layers use a cache as `Appendable`. CPU
engines write in place; a graph has its state as inputs and outputs.

    class             one call is                  keys and values are     used by
    PromptCache       prefill of one slot          a KvCache, in place     cpu.eager
    SlotCache         a decode step of some slots  a KvCache, in place     cpu.eager
    PromptState       prefill of one slot          inputs and outputs      neuron.graphs.decoders
    StepState         a decode step of some slots  inputs and outputs      neuron.graphs.decoders
    FrameCache        a code predictor step        its own, for one frame  model.code_predictor
"""

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.model.config import DecoderConfig

Parts = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [slots, kv_heads, positions, head_dim] of consecutive positions."""


class Appendable(Protocol):
    """KV cache as a decoder layer sees it."""

    @property
    def mask(self) -> Tensor | None:
        """Mask, bool [slots, 1, T, keys]: True for keys hidden from the new positions.

        None if new positions see all keys up to their own: T is 1, or no earlier keys exist.
        """

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """Store new keys and values [slots, kv_heads, T, head_dim]; return all visible ones."""


@dataclass(frozen=True)
class KvCache:
    """Keys and values [layers, slots, kv_heads, positions, head_dim].

    `slots` and `window` are views.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def zeros(config: DecoderConfig, slots: int, positions: int, dtype: torch.dtype) -> "KvCache":
        """Create a cache of zeros: masked values still count, times 0."""
        shape = (config.layers, slots, config.kv_heads, positions, config.head_dim)
        return KvCache(lazy_zeros(shape, dtype), lazy_zeros(shape, dtype))

    def slots(self, start: int, stop: int) -> "KvCache":
        """Return the slots [start, stop)."""
        return KvCache(self.keys[:, start:stop], self.values[:, start:stop])

    def window(self, positions: int) -> "KvCache":
        """Return the first `positions` of every slot."""
        return KvCache(self.keys[..., :positions, :], self.values[..., :positions, :])


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that use memory only where written, a small page at a time."""
    # torch.zeros writes all of it, and numpy's zeros come in pages of 2 MB.
    # MAP_PRIVATE: a forked process gets its own copy, as for any tensor.
    own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, **own)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)


class PromptCache:
    """Prefill in place: rows of a prompt fill one slot from position `start` on.

    They see the first `start` positions and each other, in the cache's dtype. cache: that slot's;
    with a `start`, its window up to the last new row.
    """

    def __init__(self, cache: KvCache, start: int = 0):
        self._cache, self._start = cache, start
        self.mask: Tensor | None = None
        if start:
            positions = torch.arange(cache.keys.shape[3])
            self.mask = (positions > positions[start:, None])[None, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """See Appendable.append."""
        stop = self._start + keys.shape[2]
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        cached_keys[:, :, self._start : stop] = keys
        cached_values[:, :, self._start : stop] = values
        if not self._start and cached_keys.dtype == keys.dtype:
            return ((keys, values),)
        held = cached_keys[:, :, :stop], cached_values[:, :, :stop]
        return ((held[0].to(keys.dtype), held[1].to(keys.dtype)),)


class SlotCache:
    """Decode in several slots in place: one row each, at the slot's position.

    cache: all slots, up to the longest slot's new row. slots: int64 [n], slots in use. lengths:
    int64 [n], the new rows' positions.
    """

    def __init__(self, cache: KvCache, slots: Tensor, lengths: Tensor):
        self._cache, self._slots, self._lengths = cache, slots, lengths
        positions = torch.arange(cache.keys.shape[3])
        self.mask = (positions > lengths[:, None])[:, None, None, :]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """See Appendable.append."""
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        return ((self._put(cached_keys, keys), self._put(cached_values, values)),)

    def _put(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n, kv_heads, 1, head_dim] into cache [slots, kv_heads, window, head_dim].

        Returns [n, kv_heads, window, head_dim] of the slots in use.
        """
        cache[self._slots, :, self._lengths] = rows.squeeze(2).to(cache.dtype)
        return cache.index_select(0, self._slots).to(rows.dtype)


Segments = tuple[Tensor, ...]
"""KV cache of a graph, cut along positions. A graph uses the first ones or all.

Each is [slots, 2 layers, kv_heads, positions, head_dim]: keys of layer 0, values of layer 0, keys
of layer 1, ... A graph rewrites whole tensors: a scatter would write number by number. So a decode
step writes to a smaller tensor, the slots' recent rows, and only reads the segments in use.
`flushed` moves full recent rows into the segments.
"""


def rows_by_slot(named: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return each slot's row, integer [slots], and whether it has one, bool [slots].

    named: each row's slot, integer [n]; any other number for a row without a slot.
    """
    numbers = torch.arange(slots, dtype=named.dtype, device=named.device)
    matches = named[:, None] == numbers  # [n, slots]
    rows = torch.arange(len(named), dtype=named.dtype, device=named.device)
    return torch.where(matches, rows[:, None], 0).amax(0), matches.any(0)


def flushed(
    segments: Segments, recent: Tensor, held: Tensor, counts: Tensor, source: Tensor, target: Tensor
) -> Segments:
    """Return the segments with each slot's recent rows written after its held positions.

    held, counts: integer [slots], a slot's positions in the segments, and recent rows to write.
    Later positions become zeros. source, target: integer [1]; if they differ, slot `target` becomes
    a copy of the new slot `source`.
    """
    kind, device = held.dtype, held.device
    row = torch.arange(recent.shape[3], dtype=kind, device=device)
    positions = torch.arange(_positions(segments), dtype=kind, device=device)
    is_row = row < counts[:, None]  # [slots, recent rows]
    # Products with ones and zeros move the rows together, and exactly.
    places = positions[:, None] == (held[:, None] + row)[:, None]  # [slots, positions, recent rows]
    ones = places.to(recent.dtype).unsqueeze(1)
    rows = torch.where(is_row[:, None, None, :, None], recent, 0)
    placed = torch.stack([ones @ rows[:, index] for index in range(rows.shape[1])], 1)
    is_of_source = (positions >= held.index_select(0, source))[None, None, None, :, None]
    is_target = _one_hot(target, len(recent)) & (source == target).logical_not()
    # One choice per segment, which is read and written once.
    earlier = torch.cat([old.index_select(0, source) for old in segments], 3)
    copied = torch.where(is_of_source, placed.index_select(0, source), earlier)
    first_new = torch.where(is_target.flatten(), 0, held)
    is_new = (positions >= first_new[:, None])[:, None, None, :, None]
    return _renewed(segments, is_new, torch.where(is_target, copied, placed))


class PromptState:
    """Prefill in a graph: rows of a prompt fill one slot from position `length` on.

    They see the first `length` positions and each other. slot, length, last: integer [1]; rows
    after `last` are padding, which is not written. rows: their number, padding included. Positions
    after the last row become zeros.
    """

    def __init__(self, segments: Segments, slot: Tensor, length: Tensor, last: Tensor, rows: int):
        kind, device = length.dtype, length.device
        row = torch.arange(rows, dtype=kind, device=device)
        positions = torch.arange(_positions(segments), dtype=kind, device=device)
        self._segments = segments
        self._is_slot = _one_hot(slot, len(segments[0]))
        self._held = [segment.index_select(0, slot) for segment in segments]
        self._is_row = (row <= last)[:, None]
        self._places = positions[:, None] == length + row  # [positions, rows]
        self._is_held = (positions < length)[:, None]
        self._new: list[Tensor] = []
        unseen = self._is_held.logical_not().view(1, -1).expand(rows, -1)
        self.mask = torch.cat((unseen, row > row[:, None]), 1)[None, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """See Appendable.append. keys, values: [1, kv_heads, rows, head_dim]."""
        # Masked values count, too, times 0: they must be finite.
        keys, values = (torch.where(self._is_row, rows, 0) for rows in (keys, values))
        self._new += [keys, values]
        parts, begin = [], 0
        for held in self._held:
            end = begin + held.shape[3]
            earlier = torch.where(self._is_held[begin:end], held[:, 2 * layer + 1], 0)
            parts.append((held[:, 2 * layer], earlier))
            begin = end
        return (*parts, (keys, values))

    @property
    def new_state(self) -> Segments:
        """The segments after every layer's `append`."""
        # A product with ones and zeros moves the rows together, and exactly.
        ones = self._places.to(self._new[0].dtype)
        placed = torch.stack([ones @ rows for rows in self._new], 1)
        is_new = self._is_slot & self._is_held.logical_not()
        return _renewed(self._segments, is_new, placed)


class StepState:
    """Decode in a graph: one row a slot, written after the slot's recent rows.

    recent: all slots' recent rows. slots: integer [n], each row's slot, or the number of slots for
    an idle row, which is not written; None: the rows are all slots, in order. held, counts: integer
    [n], positions of a row's slot in the segments, and its number of recent rows, -1 for an idle
    row.
    """

    def __init__(
        self, recent: Tensor, segments: Segments, slots: Tensor | None, held: Tensor, counts: Tensor
    ):
        kind, device = held.dtype, held.device
        self._recent, self._slots, self._counts = recent, slots, counts
        self._row = torch.arange(recent.shape[3], dtype=kind, device=device)
        tensors = [recent, *segments]
        if slots is not None:
            named = slots.clamp(max=len(recent) - 1)
            tensors = [tensor.index_select(0, named) for tensor in tensors]
        self._own, *self._held = tensors
        is_recent = self._row < counts[:, None]
        self._is_recent = is_recent[:, None, :, None]
        positions = torch.arange(_positions(segments), dtype=kind, device=device)
        unseen = [positions >= held[:, None], is_recent.logical_not()]
        itself = (counts < -1)[:, None]  # always False: a row sees its own key
        self.mask = torch.cat((*unseen, itself), 1)[:, None, None, :]
        self._new: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """See Appendable.append. T is 1."""
        self._new += [keys, values]
        # Masked values count, too, times 0: they must be finite. Recent rows may be anything.
        recent = torch.where(self._is_recent, self._own[:, 2 * layer + 1], 0)
        parts = [(held[:, 2 * layer], held[:, 2 * layer + 1]) for held in self._held]
        return (*parts, (self._own[:, 2 * layer], recent), (keys, values))

    @property
    def new_recent(self) -> Tensor:
        """All slots' recent rows after every layer's `append`."""
        rows, counts = torch.stack(self._new, 1), self._counts
        if self._slots is not None:
            row, is_named = rows_by_slot(self._slots, len(self._recent))
            rows, counts = rows.index_select(0, row), counts.index_select(0, row)
            counts = torch.where(is_named, counts, -1)
        is_new = (self._row == counts[:, None])[:, None, None, :, None]
        return torch.where(is_new, rows, self._recent)


def _one_hot(slot: Tensor, slots: int) -> Tensor:
    numbers = torch.arange(slots, dtype=slot.dtype, device=slot.device)
    return (numbers == slot).view(-1, 1, 1, 1, 1)


def _positions(segments: Segments) -> int:
    return sum(segment.shape[3] for segment in segments)


def _renewed(segments: Segments, is_new: Tensor, new: Tensor) -> Segments:
    renewed, begin = [], 0
    for segment in segments:
        end = begin + segment.shape[3]
        flags = is_new[:, :, :, begin:end]
        renewed.append(torch.where(flags, new[:, :, :, begin:end], segment))
        begin = end
    return tuple(renewed)


@dataclass
class FrameCache:
    """The code predictor's cache for one frame: at most 16 positions, the same in all slots.

    by_sums: see model.decoder.Attention.
    """

    by_sums: bool = False
    mask = None
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        """See Appendable.append."""
        if layer in self._held:
            cached_keys, cached_values = self._held[layer]
            keys = torch.cat((cached_keys, keys), 2)
            values = torch.cat((cached_values, values), 2)
        self._held[layer] = keys, values
        return ((keys, values),)
