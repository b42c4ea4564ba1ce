"""Slots whose rows torch computes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import PromptCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class EagerSlots(Slots):
    """Slots of a thinker or a talker of model/.

    prompt_buckets: row counts that prompts are padded to, ascending; if empty, nothing is padded.
    Otherwise as Slots.
    """

    def __init__(
        self,
        config: DecoderConfig,
        model: Thinker | Talker,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
        prompt_buckets: Sequence[int] = (),
    ):
        super().__init__(config, slots, context_length, dtype)
        self._model, self._buckets = model, tuple(prompt_buckets)

    def step(self, slots: Sequence[int], inputs: Tensor) -> Any:
        """Append one row to each slot.

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

    def _append(
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
