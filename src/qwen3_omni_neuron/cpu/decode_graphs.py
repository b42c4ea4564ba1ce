"""The decode step of one decoder as traced graphs: where it does not run in C, see native."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.engine.decoder import Numbers
from qwen3_omni_neuron.model.kv_cache import KvCache, LineCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class DecodeGraphs:
    """The model's `decode` over a KV cache, traced for one slot and for several.

    example: its first input, for one slot.
    """

    def __init__(self, model: Thinker | Talker, cache: KvCache, example: Tensor):
        slots, positions = cache.keys.shape[1], cache.keys.shape[3]
        self._cache, self._number = cache, Numbers(positions)

        def decode_one(row: Tensor, position: Tensor, length: Tensor, *cache: Tensor) -> Any:
            return model.decode(row, position, LineCache(KvCache(*cache), length))

        def decode_many(
            rows: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, *cache: Tensor
        ) -> Any:
            return model.decode(rows, positions, SlotCache(KvCache(*cache), slots, lengths))

        window = cache.lines(0, 1).window(2)
        self._one = trace_graph(
            model, decode_one, example, torch.ones(1), self._number(1), window.keys, window.values
        )
        if slots > 1:
            two, window = torch.tensor([0, 1]), cache.window(2)
            self._many = trace_graph(
                model, decode_many, torch.cat((example, example)), torch.ones(2), two, two,
                window.keys, window.values,
            )  # fmt: skip

    def __call__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[float],
        inputs: Tensor,
    ) -> Any:
        """See cpu.slots.Decode."""
        where = torch.tensor(positions)
        if len(slots) == 1:
            slot, length = slots[0], lengths[0]
            window = self._cache.lines(slot, slot + 1).window(length + 1)
            return self._one(inputs, where, self._number(length), window.keys, window.values)
        window = self._cache.window(max(lengths) + 1)
        return self._many(
            inputs, where, torch.tensor(slots), torch.tensor(lengths), window.keys, window.values
        )
