"""KV cache slots of one decoder (thinker or talker) on the CPU, and the calls that fill them.

A slot is one row of the KV cache: the keys and values of one request. Slots decides which code runs
and for which position. That code computes new keys and values and writes them to the cache:

- in C, in write_kv_row of cpu/native/decoder.c, which cpu.native.steps.NativeSteps calls, or
- in torch, in `append` of the caches of model.kv_cache.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class Slots:
    """KV cache of a decoder, with each slot's length and next rope position.

    context_length: positions of a slot. dtype: type of the KV cache. prompt_buckets: row counts
    that torch's prompts are padded to, ascending; if empty, nothing is padded. library: computes
    `prefill` and `decode`, with up to `threads` threads; None: torch does. native: its calls in C.
    """

    extends = True

    def __init__(
        self,
        config: DecoderConfig,
        model: Thinker | Talker,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
        prompt_buckets: Sequence[int] = (),
        library: Any = None,
        threads: int = 1,
    ):
        self.slots, self.context_length = slots, context_length
        self._model, self._buckets = model, tuple(prompt_buckets)
        self._cache = KvCache.zeros(config, slots, context_length, dtype)
        self._lengths = [0] * slots
        self._next_positions = [0.0] * slots
        self.native: NativeSteps | None = None
        if library is not None:
            self.native = NativeSteps(config, model, self._cache, library, threads)

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append rows after the first `start` rows of a slot, and drop its later rows.

        rows: [S, hidden]; positions: float32 [3, S]; extra: arguments of the model's `prefill`
        after the cache. Returns what `prefill` returns, which may include padding rows.
        """
        self._begin(slot, start)
        if self.native:
            outputs = self.native.prefill(slot, start, rows, positions, *extra)
        else:
            outputs = self._padded_prefill(slot, start, rows, positions, *extra)
        self._end(slot, start + len(rows), float(positions.max()))
        return outputs

    def prefill_ids(
        self,
        slot: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        *more: Any,
    ) -> Tensor:
        """Append rows of a table after a slot's first `start`, in C: see NativeSteps.prefill_ids.

        Otherwise like `prefill`.
        """
        assert self.native is not None, "only where the library is"
        self._begin(slot, start)
        logits = self.native.prefill_ids(slot, start, ids, positions, *more)
        self._end(slot, start + positions.shape[1], float(positions.max()))
        return logits

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another slot, and drop the other rows of the latter.

        The target can't take a step before its next prefill, which sets its rope position.
        """
        held = self._lengths[source]
        assert rows <= held, f"{rows} rows to copy, and slot {source} holds {held}"
        for cache in (self._cache.keys, self._cache.values):
            cache[:, target, :, :rows] = cache[:, source, :, :rows]
        self._lengths[target] = rows

    def step(self, slots: Sequence[int], inputs: Tensor) -> Any:
        """Append one row to each slot, in torch.

        inputs: token ids int64 [n] or embeddings [n, hidden], as the model's `decode` takes them.
        Returns what `decode` returns.
        """
        lengths, positions = self._ends(slots)
        cache = SlotCache(
            self._cache.window(max(lengths) + 1), torch.tensor(slots), torch.tensor(lengths)
        )
        outputs = self._model.decode(inputs, torch.tensor(positions), cache)
        self._count_step(slots)
        return outputs

    def step_ids(self, slots: Sequence[int], ids: Sequence[int], *tables: Any) -> Tensor:
        """Append one row of a table to each slot, in C; see NativeSteps.decode."""
        assert self.native is not None, "only where the library is"
        logits = self.native.decode(slots, *self._ends(slots), ids, *tables)
        self._count_step(slots)
        return logits

    def _begin(self, slot: int, start: int) -> None:
        held = self._lengths[slot]
        assert start <= held, f"rows follow {start}, and slot {slot} holds {held}"
        # Only these rows are valid during the call, and after a call that raises.
        self._lengths[slot] = start

    def _end(self, slot: int, length: int, last_position: float) -> None:
        self._lengths[slot], self._next_positions[slot] = length, last_position + 1

    def _ends(self, slots: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return the slots' lengths and next rope positions."""
        return [self._lengths[s] for s in slots], [self._next_positions[s] for s in slots]

    def _count_step(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1

    def _padded_prefill(
        self, slot: int, start: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        length = len(rows)
        bucket = bucket_of(length, self._buckets, "prompt rows")
        padding = min(bucket, self.context_length - start) - length
        if padding:  # F.pad copies even where there is nothing to pad
            rows, positions = F.pad(rows, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        window = self._cache.slots(slot, slot + 1).window(start + len(rows))
        last = torch.tensor([length - 1])
        return self._model.prefill(rows, positions, last, PromptCache(window, start), *extra)
