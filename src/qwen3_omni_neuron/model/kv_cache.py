"""KV caches: plain tensors that the caller owns, and the three ways a decoder fills them.

Each way has `append(layer, keys, values)`, which stores the new positions' keys and values
[slots * kv_heads, T, head_dim] and returns all that the new positions attend to, and `mask`, bool
[slots, 1, window] or None where all of it is valid.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.config import DecoderConfig


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


class SlotCache:
    """Decode: one row a slot, written at that slot's own position, in place.

    cache: the window up to the longest slot's new row. lengths: int64 [slots], the positions
    that the new rows are written to.
    """

    def __init__(self, cache: KvCache, lengths: Tensor):
        self._cache, self._lengths = cache, lengths
        self._slots = int(lengths.shape[0])
        self.mask: Tensor | None = None
        if self._slots > 1:
            positions = torch.arange(cache.keys.shape[3])
            self.mask = (positions <= lengths[:, None])[:, None, :]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        if self._slots == 1:
            all_keys, all_values = all_keys.squeeze(0), all_values.squeeze(0)
            all_keys.index_copy_(1, self._lengths, keys)
            all_values.index_copy_(1, self._lengths, values)
            return all_keys, all_values
        slots = torch.arange(self._slots)
        all_keys[slots, :, self._lengths] = keys.view(self._slots, -1, keys.shape[2])
        all_values[slots, :, self._lengths] = values.view(self._slots, -1, values.shape[2])
        return all_keys.flatten(0, 1), all_values.flatten(0, 1)


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
