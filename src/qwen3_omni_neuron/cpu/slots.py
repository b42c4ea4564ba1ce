"""The slots of one decoder on the CPU: its KV cache, where each slot stands, and its step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.buckets import bucket_of
from qwen3_omni_neuron.config import DecoderConfig
from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.engine.decoder import Numbers
from qwen3_omni_neuron.model.kv_cache import KvCache, LineCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.moe import FEW_ROWS
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class Slots:
    """The lines of a KV cache, each with its length and its next rope position.

    model: has `prefill` and `decode`, which are traced here, the latter for one slot and for
    several. example: the first input of `decode`, for one slot. context_length: positions a line
    holds. prompt_buckets: row counts that prompts are padded to, ascending; none: no padding.
    extra: an example of what `prefill` takes after the cache.
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

        def decode_one(row: Tensor, position: Tensor, length: Tensor, *cache: Tensor) -> Any:
            return model.decode(row, position, LineCache(KvCache(*cache), length))

        def decode_many(
            rows: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, *cache: Tensor
        ) -> Any:
            return model.decode(rows, positions, SlotCache(KvCache(*cache), slots, lengths))

        one, position, line = self._number(1), torch.ones(1), self._cache.lines(0, 1)
        # More rows than the experts' decode step takes: see model.moe.
        rows = torch.zeros(FEW_ROWS + 1, config.hidden_size, dtype=dtype)
        positions = torch.zeros(3, len(rows))
        self._prefill = trace_graph(
            model, prefill, rows, positions, one, line.keys, line.values, *extra
        )
        window = line.window(2)
        self._decode_one = trace_graph(
            model, decode_one, example, position, one, window.keys, window.values
        )
        if slots > 1:
            two, window = torch.tensor([0, 1]), self._cache.window(2)
            self._decode_many = trace_graph(
                model, decode_many, torch.cat((example, example)), torch.ones(2), two, two,
                window.keys, window.values,
            )  # fmt: skip

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0. rows: [S, hidden]; positions: float32 [3, S]; extra: what
        the model's `prefill` takes after the cache. Returns what it does, rows of padding
        included."""
        length = len(rows)
        padding = bucket_of(length, self._buckets, "prompt rows") - length
        line = self._cache.lines(slot, slot + 1)
        following = float(positions.max()) + 1
        if padding:  # even no padding would be a copy
            rows, positions = F.pad(rows, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        outputs = self._prefill(
            rows,
            positions,
            self._number(length - 1),
            line.keys,
            line.values,
            *extra,
        )
        self._lengths[slot] = length
        self._next_positions[slot] = following
        return outputs

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
        window = self._cache.lines(slot, slot + 1).window(length + 1)
        return self._decode_one(
            row,
            torch.tensor([self._next_positions[slot]]),
            self._number(length),
            window.keys,
            window.values,
        )
