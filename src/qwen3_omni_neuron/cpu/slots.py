"""The slots of one decoder on the CPU: its KV cache, where each slot stands, and its steps."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.compilation.buckets import bucket_of
from qwen3_omni_neuron.cpu.native.choice import native_steps
from qwen3_omni_neuron.cpu.traced import DecodeGraphs, trace_graph
from qwen3_omni_neuron.engines.inputs import Numbers
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache
from qwen3_omni_neuron.model.moe import FEW_ROWS
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker

SHORT_PROMPT = 48
"""Rows up to which C is the faster; torch's matrix products are for more. See BENCHMARK.md."""


class Decode(Protocol):
    """Appends one row to each of several slots."""

    def __call__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[float],
        inputs: Tensor,
    ) -> Any:
        """slots: lines of the KV cache; lengths: how many positions of each are filled; positions:
        the new rows' rope positions; inputs, and what is returned: as the model's `decode` has
        them."""
        ...


class Slots:
    """The lines of a KV cache, each with its length and its next rope position.

    model: has `prefill` and `decode`, which run in C where that can be had and is the faster, and
    are traced here else. example: the first input of `decode`, for one slot. context_length:
    positions a line holds. prompt_buckets: row counts that the graph's prompts are padded to,
    ascending; none: no padding. extra: an example of what `prefill` takes after the cache, of
    which there is nothing: [..., 0, ...] each.
    """

    def __init__(
        self,
        config: DecoderConfig,
        model: Thinker | Talker,
        example: Tensor,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
        prompt_buckets: Sequence[int] = (),
        extra: tuple[Tensor, ...] = (),
    ):
        self.slots, self.context_length = slots, context_length
        self._buckets = tuple(prompt_buckets)
        self._cache = KvCache.zeros(config, slots, context_length, dtype)
        self._lengths = [0] * slots
        self._next_positions = [0.0] * slots
        self._number = Numbers(context_length)

        def prefill(
            rows: Tensor,
            positions: Tensor,
            last: Tensor,
            keys: Tensor,
            values: Tensor,
            *extra: Tensor,
        ) -> tuple[Tensor, Tensor]:
            cache = PromptCache(KvCache(keys, values))
            return model.prefill(rows, positions, last, cache, *extra)

        line = self._cache.lines(0, 1)
        # More rows than the experts' decode step takes: see model.moe.
        rows = torch.zeros(FEW_ROWS + 1, config.hidden_size, dtype=dtype)
        positions = torch.zeros(3, len(rows))
        self._prefill_graph = trace_graph(
            model, prefill, rows, positions, self._number(1), line.keys, line.values, *extra
        )
        self._native = native_steps(config, model, self._cache)
        self._decode: Decode = (
            self._native.decode if self._native else DecodeGraphs(model, self._cache, example)
        )

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0. rows: [S, hidden]; positions: float32 [3, S]; extra: what
        the model's `prefill` takes after the cache. Returns what it does, rows of padding
        included."""
        length = len(rows)
        if self._native and length <= SHORT_PROMPT and not any(map(torch.numel, extra)):
            outputs = self._native.prefill(slot, rows, positions)
        else:
            outputs = self._padded_prefill(slot, rows, positions, *extra)
        self._lengths[slot] = length
        self._next_positions[slot] = float(positions.max()) + 1
        return outputs

    def step(self, slots: Sequence[int], inputs: Tensor) -> Any:
        """Append one row to each slot: token ids int64 [n] or embeddings [n, hidden], as `decode`
        takes them. Returns what it does."""
        lengths = [self._lengths[slot] for slot in slots]
        positions = [self._next_positions[slot] for slot in slots]
        outputs = self._decode(slots, lengths, positions, inputs)
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1
        return outputs

    def _padded_prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        length, line = len(rows), self._cache.lines(slot, slot + 1)
        padding = bucket_of(length, self._buckets, "prompt rows") - length
        if padding:  # even no padding would be a copy
            rows, positions = F.pad(rows, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        return self._prefill_graph(
            rows, positions, self._number(length - 1), line.keys, line.values, *extra
        )
