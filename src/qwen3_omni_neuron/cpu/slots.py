"""The slots of one decoder on the CPU: its KV cache, where each slot stands, and its step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.config import DecoderConfig
from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.model.kv_cache import Appendable, KvCache, LineCache, SlotCache

Decode = Callable[[Tensor, Tensor, Appendable], Any]


class Numbers:
    """Integers as tensors int64 [1], ready made: views on a count from 0 up to `limit`."""

    def __init__(self, limit: int):
        self._count = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        return self._count[number : number + 1]


class Slots:
    """The lines of a KV cache, each with its length and its next rope position.

    model, decode: a module and its `decode`, traced here for one slot and for several. example:
    its first input, for one slot. context_length: positions a line holds.
    """

    def __init__(
        self,
        config: DecoderConfig,
        model: nn.Module,
        decode: Decode,
        example: Tensor,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
    ):
        self._cache = KvCache.zeros(config, slots, context_length, dtype)
        self._lengths = [0] * slots
        self._next_positions = [0] * slots
        self._number = Numbers(max(context_length, config.max_positions))

        def decode_one(row: Tensor, position: Tensor, length: Tensor, *cache: Tensor) -> Any:
            return decode(row, position, LineCache(KvCache(*cache), length))

        def decode_many(
            rows: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, *cache: Tensor
        ) -> Any:
            return decode(rows, positions, SlotCache(KvCache(*cache), slots, lengths))

        one, window = self._number(1), self._cache.lines(0, 1).window(2)
        self._decode_one = trace_graph(
            model, decode_one, example, one, one, window.keys, window.values
        )
        if slots > 1:
            two, window = torch.tensor([0, 1]), self._cache.window(2)
            self._decode_many = trace_graph(
                model, decode_many, torch.cat((example, example)), two, two, two,
                window.keys, window.values,
            )  # fmt: skip

    def line(self, slot: int) -> KvCache:
        """A slot's own line, for a prefill to fill from position 0."""
        return self._cache.lines(slot, slot + 1)

    def filled(self, slot: int, positions: Tensor) -> None:
        """A prefill has filled the slot. positions: int64 [3, S], those of its rows."""
        self._lengths[slot] = positions.shape[1]
        self._next_positions[slot] = int(positions.max()) + 1

    def step(self, slots: Sequence[int], rows: Tensor) -> Any:
        """Append one row to each slot: token ids int64 [n] or embeddings [n, hidden], as `decode`
        takes them. Returns what it does."""
        if len(slots) == 1:
            outputs = self._step_one(slots[0], rows)
        else:
            lengths = [self._lengths[slot] for slot in slots]
            window = self._cache.window(max(lengths) + 1)
            outputs = self._decode_many(
                rows,
                torch.tensor([self._next_positions[slot] for slot in slots]),
                torch.tensor(slots),
                torch.tensor(lengths),
                window.keys,
                window.values,
            )
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1
        return outputs

    def _step_one(self, slot: int, row: Tensor) -> Any:
        length = self._lengths[slot]
        window = self.line(slot).window(length + 1)
        return self._decode_one(
            row,
            self._number(self._next_positions[slot]),
            self._number(length),
            window.keys,
            window.values,
        )
