"""KV cache slots of one decoder (thinker or talker) on the CPU, and the calls that fill them.

A slot is one row of the KV cache: the keys and values of one request. Slots decides which code runs
and for which position. That code computes new keys and values and writes them to the cache:

- in C, in decode_rows of cpu/native/decoder.c, which cpu.native.steps.NativeSteps calls, or
- in torch, in `append` of the caches of model.kv_cache, which the traced graphs of cpu.traced call.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.cpu.native.installed import native_steps
from qwen3_omni_neuron.cpu.traced import DecodeGraphs, trace_graph
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.inputs import Numbers
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache
from qwen3_omni_neuron.model.moe import FEW_ROWS
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker

SHORT_PROMPT = 48
"""Rows of the longest prompt that C prefills faster than torch's matrix products: BENCHMARK.md."""


class Decode(Protocol):
    """Function that appends one row to each of several slots."""

    def __call__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[float],
        inputs: Tensor,
    ) -> Any:
        """Run the decoder on one new row a slot, and write its keys and values to the KV cache.

        slots: which ones; lengths: number of filled positions of each; positions: the new rows'
        rope positions; inputs: as the model's `decode` takes them. Returns what `decode` returns.
        """
        ...


class Slots:
    """KV cache of a decoder, with each slot's length and next rope position.

    model: its `prefill` and `decode` run in C where that is possible and faster, else as traced
    graphs. example: the first input of `decode`, for one slot. context_length: positions of a slot.
    prompt_buckets: row counts that a graph's prompts are padded to, ascending; if empty, nothing is
    padded. extra: examples of the further inputs of `prefill`, after the cache, for a prompt that
    has none of them: each has an axis of size 0.
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

        slot_cache = self._cache.slots(0, 1)
        # More rows than the experts' decode step takes: see model.moe.
        rows = torch.zeros(FEW_ROWS + 1, config.hidden_size, dtype=dtype)
        positions = torch.zeros(3, len(rows))
        self._prefill_graph = trace_graph(
            model,
            prefill,
            rows,
            positions,
            self._number(1),
            slot_cache.keys,
            slot_cache.values,
            *extra,
        )
        self._native = native_steps(config, model, self._cache)
        self._decode: Decode = (
            self._native.decode if self._native else DecodeGraphs(model, self._cache, example)
        )

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0.

        rows: [S, hidden]; positions: float32 [3, S]; extra: the further inputs of the model's
        `prefill`, after the cache. Returns what `prefill` returns, which may include rows of
        padding.
        """
        length = len(rows)
        if self._native and length <= SHORT_PROMPT and not any(map(torch.numel, extra)):
            outputs = self._native.prefill(slot, rows, positions)
        else:
            outputs = self._padded_prefill(slot, rows, positions, *extra)
        self._lengths[slot] = length
        self._next_positions[slot] = float(positions.max()) + 1
        return outputs

    def step(self, slots: Sequence[int], inputs: Tensor) -> Any:
        """Append one row to each slot.

        inputs: token ids int64 [n] or embeddings [n, hidden], as the model's `decode` takes them.
        Returns what `decode` returns.
        """
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
        length, slot_cache = len(rows), self._cache.slots(slot, slot + 1)
        padding = bucket_of(length, self._buckets, "prompt rows") - length
        if padding:  # F.pad copies even where there is nothing to pad
            rows, positions = F.pad(rows, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        return self._prefill_graph(
            rows, positions, self._number(length - 1), slot_cache.keys, slot_cache.values, *extra
        )
