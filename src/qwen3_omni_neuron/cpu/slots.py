"""The slots of one decoder on the CPU: its KV cache, where each slot stands, and its step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.config import DecoderConfig
from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.model.kv_cache import KvCache

Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Numbers:
    """Integers as tensors int64 [1], ready made: views on a count from 0 up to `limit`."""

    def __init__(self, limit: int):
        self._count = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        return self._count[number : number + 1]


class Slots:
    """The lines of a KV cache, each with its length and its next rope position.

    model, decode: a module and its `decode`, traced here for one slot. example: its first input.
    context_length: positions a line holds.
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
        one, window = self._number(1), self._cache.lines(0, 1).window(2)
        self._decode = trace_graph(model, decode, example, one, one, window.keys, window.values)

    def line(self, slot: int) -> KvCache:
        """A slot's own line, for a prefill to fill from position 0."""
        return self._cache.lines(slot, slot + 1)

    def filled(self, slot: int, positions: Tensor) -> None:
        """A prefill has filled the slot. positions: int64 [3, S], those of its rows."""
        self._lengths[slot] = positions.shape[1]
        self._next_positions[slot] = int(positions.max()) + 1

    def step(self, slot: int, row: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row: a token id int64 [1] or an embedding [1, hidden], as `decode` takes."""
        length = self._lengths[slot]
        window = self.line(slot).window(length + 1)
        outputs = self._decode(
            row,
            self._number(self._next_positions[slot]),
            self._number(length),
            window.keys,
            window.values,
        )
        self._lengths[slot] += 1
        self._next_positions[slot] += 1
        return outputs
