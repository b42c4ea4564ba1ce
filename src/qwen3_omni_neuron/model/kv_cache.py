"""KV caches: where a decoder stores keys and values, and what its new rows attend to.

A slot is one row of a cache: the keys and values of one conversation. Decoder layers know a cache
as `Appendable`. Its classes differ in what a call fills and where the result goes: an engine on the
CPU writes in place, a graph for Neuron takes its state as inputs and returns it as outputs.

    class             one call is                  keys and values are     used by
    PromptCache       prefill of one slot          a KvCache, in place     cpu.eager
    SlotCache         a decode step of some slots  a KvCache, in place     cpu.eager
    PromptState       prefill of one slot          inputs and outputs      neuron.graphs.decoders
    PromptChunkState  chunked prefill of one slot  inputs and outputs      neuron.graphs.decoders
    StepState         a decode step of some slots  inputs and outputs      neuron.graphs.decoders
    FrameCache        a code predictor step        its own, for one frame  model.code_predictor
"""

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
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


KvTensors = tuple[Tensor, ...]
"""KV cache of a graph: keys of layer 0, values of layer 0, keys of layer 1, ...

Each is [slots, kv_heads, positions, head_dim].
"""


class PromptState:
    """Prefill in a graph: the prompt's rows fill one slot from position 0 and see each other.

    slot: int64 [1], index of the slot. Its positions after the rows become zeros.
    new_state: the KvTensors after the call, complete when every layer has appended.
    """

    mask = None

    def __init__(self, state: KvTensors, slot: Tensor):
        self._state, self._slot = state, slot
        self.new_state: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the slot; see Appendable.append. keys, values: [1, kv_heads, rows, head_dim]."""
        for cache, new in zip(self._state[2 * layer :], (keys, values), strict=False):
            filled = F.pad(new, (0, 0, 0, cache.shape[2] - new.shape[2]))
            self.new_state.append(cache.index_copy(0, self._slot.long(), filled))
        return keys, values


class PromptChunkState:
    """Chunked prefill in a graph: further rows fill one slot from position `length` on.

    They see the first `length` positions and each other. slot, length, last: int64 [1]; rows after
    `last` are padding, which is written nowhere. rows: number of rows with padding, at most the
    cache's positions. window: how many positions are read; length + last is below it. The slot's
    entries after the last row are kept, but read as zeros, so that they may have any value.
    new_state: the KvTensors after the call, complete when every layer has appended.
    """

    def __init__(
        self, state: KvTensors, slot: Tensor, length: Tensor, last: Tensor, rows: int, window: int
    ):
        self._state, self._slot, self._window = state, slot, window
        kind, device = length.dtype, length.device
        row, positions = (torch.arange(n, dtype=kind, device=device) for n in (rows, window))
        # A call writes `rows` consecutive positions. Where padding would exceed the cache's end,
        # they begin earlier: 8 rows at length 60 of 64 positions write 56 to 63, of which 56 to 59
        # keep their values.
        self._at = row + length.clamp(max=state[0].shape[2] - rows)
        place = self._at - length  # the row of each position, below 0 for one that is kept
        self._row = place.clamp(min=0)
        self._is_new = ((place >= 0) & (place <= last))[:, None]
        self._is_unused = (positions > length + last)[:, None]
        self.mask = (positions > (length + row)[:, None])[None, None]
        self.new_state: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows; see Appendable.append. keys, values: [1, kv_heads, rows, head_dim]."""
        cached_keys, cached_values = self._state[2 * layer : 2 * layer + 2]
        return self._put(cached_keys, keys), self._put(cached_values, values)

    def _put(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write rows [1, kv_heads, rows, head_dim] into a copy of cache, for the new state.

        Returns [1, kv_heads, window, head_dim] of the slot.
        """
        head = torch.arange(cache.shape[1], dtype=self._at.dtype, device=cache.device)[:, None]
        where = self._slot[:, None], head, self._at[None]
        new = torch.where(self._is_new, rows[0].index_select(1, self._row), cache[where])
        written = cache.index_put(where, new)
        self.new_state.append(written)
        read = written[:, :, : self._window].index_select(0, self._slot)
        return read.masked_fill(self._is_unused, 0)


class StepState:
    """Decode in a graph: one row a slot, written at that slot's own position.

    slots: int64 [n], indices of the slots. lengths: int64 [n], the positions that the new rows are
    written to, or -1 for an idle row: it leaves its slot unchanged and reads position 0, so that
    its result is a number, which the caller ignores. window: how many positions are read; every
    length is below it.
    new_state: the KvTensors after the call, complete when every layer has appended.
    """

    def __init__(self, state: KvTensors, slots: Tensor, lengths: Tensor, window: int):
        self._state, self._slots, self._window = state, slots, window
        self._idle = (lengths < 0)[:, None, None]
        self._at = lengths.clamp(min=0)
        positions = torch.arange(window, dtype=lengths.dtype, device=lengths.device)
        self.mask = (positions > self._at[:, None])[:, None, None, :]
        self.new_state: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position a slot; see Appendable.append. keys, values: T is 1."""
        cached_keys, cached_values = self._state[2 * layer : 2 * layer + 2]
        return self._put(cached_keys, keys), self._put(cached_values, values)

    def _put(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n, kv_heads, 1, head_dim] into a copy of cache, for the new state.

        Returns [n, kv_heads, window, head_dim] of the slots.
        """
        head = torch.arange(cache.shape[1], dtype=self._at.dtype, device=cache.device)[None]
        where = self._slots[:, None], head, self._at[:, None]
        new = torch.where(self._idle, cache[where], rows.squeeze(2))
        written = cache.index_put(where, new)
        self.new_state.append(written)
        return written[:, :, : self._window].index_select(0, self._slots)


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
