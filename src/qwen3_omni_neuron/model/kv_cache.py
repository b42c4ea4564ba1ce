"""KV caches: plain tensors that the caller owns, and the ways a decoder fills them.

Each way has `append(layer, keys, values)`, which stores the new positions' keys and values
[slots * kv_heads, T, head_dim] and returns all that the new positions attend to, and `mask`, bool
[slots, 1, 1, window] of what they must not see, or None where they see all of it.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.model.config import DecoderConfig


@dataclass(frozen=True)
class KvCache:
    """Keys and values [layers, slots, kv_heads, positions, head_dim].

    `line` and `window` are views on the same memory.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def zeros(config: DecoderConfig, slots: int, positions: int, dtype: torch.dtype) -> "KvCache":
        """An empty cache. Zeros, because a masked position still meets the values, times 0."""
        shape = (config.layers, slots, config.kv_heads, positions, config.head_dim)
        return KvCache(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype))

    def lines(self, start: int, stop: int) -> "KvCache":
        """The slots from `start` up to `stop`."""
        return KvCache(self.keys[:, start:stop], self.values[:, start:stop])

    def window(self, positions: int) -> "KvCache":
        """The first `positions` of every slot."""
        return KvCache(self.keys[..., :positions, :], self.values[..., :positions, :])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy takes zeroed pages from the system as they are touched, torch.zeros touches all now: a
    # cache for long conversations costs memory only where it is used.
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


class Appendable(Protocol):
    """What a decoder layer asks of a cache."""

    @property
    def mask(self) -> Tensor | None: ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class PromptCache:
    """Prefill: the prompt's rows fill one empty line from position 0 and see each other."""

    cache: KvCache
    mask = None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = keys.shape[1]
        self.cache.keys[layer, 0, :, :rows] = keys
        self.cache.values[layer, 0, :, :rows] = values
        return keys, values


class LineCache:
    """Decode in one slot: one row, written at its position, in place.

    cache: the slot's own line, the window up to the new row. length: int64 [1], the position that
    the new row is written to.
    """

    mask = None

    def __init__(self, cache: KvCache, length: Tensor):
        self._cache, self._length = cache, length

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, all_values = self._cache.keys[layer, 0], self._cache.values[layer, 0]
        all_keys.index_copy_(1, self._length, keys)
        all_values.index_copy_(1, self._length, values)
        return all_keys, all_values


class SlotCache:
    """Decode in several slots: one row each, written at that slot's own position, in place.

    cache: all lines, the window up to the longest slot's new row. slots: int64 [n], which lines.
    lengths: int64 [n], the positions that the new rows are written to.
    """

    def __init__(self, cache: KvCache, slots: Tensor, lengths: Tensor):
        self._cache, self._slots, self._lengths = cache, slots, lengths
        positions = torch.arange(cache.keys.shape[3])
        self.mask = (positions > lengths[:, None])[:, None, None, :]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self._put(self._cache.keys[layer], keys),
            self._put(self._cache.values[layer], values),
        )

    def _put(self, lines: Tensor, rows: Tensor) -> Tensor:
        """Write rows [n * kv_heads, 1, head_dim]; return the lines [n * kv_heads, window, ...]."""
        lines[self._slots, :, self._lengths] = rows.view(-1, lines.shape[1], lines.shape[3])
        return lines.index_select(0, self._slots).flatten(0, 1)


@dataclass
class FrameCache:
    """The code predictor's: at most 16 positions, the same for all slots, gone with the frame."""

    mask = None
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._held:
            held_keys, held_values = self._held[layer]
            keys = torch.cat((held_keys, keys), 1)
            values = torch.cat((held_values, values), 1)
        self._held[layer] = keys, values
        return keys, values


KvLines = tuple[Tensor, ...]
"""Keys of layer 0, values of layer 0, keys of layer 1, ...: each [slots, kv_heads, positions,
head_dim]."""


class PromptState:
    """Prefill: the prompt's rows fill one line from position 0 and see each other.

    slot: int64 [1], which line. Behind the rows the line becomes zeros.
    """

    mask = None

    def __init__(self, lines: KvLines, slot: Tensor):
        self._lines, self._slot = lines, slot
        self.left: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: [kv_heads, rows, head_dim]."""
        for held, new in zip(self._lines[2 * layer :], (keys, values), strict=False):
            line = F.pad(new, (0, 0, 0, held.shape[2] - new.shape[1]))
            self.left.append(held.index_copy(0, self._slot, line.unsqueeze(0)))
        return keys, values


class StepState:
    """Decode: one row a slot, written at that slot's own position.

    slots: int64 [n], which lines. lengths: int64 [n], the positions that the new rows are written
    to, or -1 for an idle row, which leaves its line as it is and reads position 0, so that its
    result, which means nothing, is a number. window: how many positions are read; every length is
    below it.
    """

    def __init__(self, lines: KvLines, slots: Tensor, lengths: Tensor, window: int):
        self._lines, self._slots, self._window = lines, slots, window
        self._idle = (lengths < 0)[:, None, None]
        self._at = lengths.clamp(min=0)
        positions = torch.arange(window, device=lengths.device)
        self.mask = (positions > self._at[:, None])[:, None, None, :]
        self.left: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: [n * kv_heads, 1, head_dim]."""
        held_keys, held_values = self._lines[2 * layer : 2 * layer + 2]
        return self._put(held_keys, keys), self._put(held_values, values)

    def _put(self, held: Tensor, rows: Tensor) -> Tensor:
        """Returns [n * kv_heads, window, head_dim] with the rows [n * kv_heads, 1, head_dim]."""
        _, heads, _, width = held.shape
        head = torch.arange(heads, device=held.device)[None]
        where = self._slots[:, None], head, self._at[:, None]
        new = torch.where(self._idle, held[where], rows.view(-1, heads, width))
        lines = held.index_put(where, new)
        self.left.append(lines)
        return lines[:, :, : self._window].index_select(0, self._slots).flatten(0, 1)
