"""KV cache slots and rows of tokens of a thinker or a talker on the CPU.

cpu.native.steps writes them in C (write_kv_row of cpu/native/decoder.c), cpu.eager in torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.talker import ROWS_AT_ONCE, TextRows
from qwen3_omni_neuron.engines.thinker import SlotLengths
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.thinker import ThinkerModel


class CpuSlots(SlotLengths):
    """KV cache of a decoder, with slots' lengths and next rope positions.

    context_length: positions of a slot. dtype: the cache's. Raises OptionError if its address space
    can't be allocated.
    """

    chunked_prefill = True

    def __init__(self, config: DecoderConfig, slots: int, context_length: int, dtype: torch.dtype):
        super().__init__(slots)
        self._written = [0] * slots  # positions that may have rows, even dropped ones
        self.context_length = context_length
        try:
            self._cache = KvCache.zeros(config, slots, context_length, dtype)
        except OSError as error:
            raise OptionError(
                f"could not allocate a KV cache of {slots} slots of {context_length} positions: "
                f"{error}. Lower max_concurrency or the context length."
            ) from error

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy a slot's first rows to another slot, and drop the target's other rows.

        The target needs a prefill before its next step.
        """
        length = self._lengths[source]
        self._drop(target, rows)
        assert rows <= length, f"{rows} rows to copy, and slot {source} holds {length}"
        for cache in (self._cache.keys, self._cache.values):
            cache[:, target, :, :rows] = cache[:, source, :, :rows]
        self._lengths[target] = rows

    def clear(self, slot: int) -> None:
        """See Thinker.clear. Unwritten positions still use no memory."""
        self._drop(slot, 0)
        super().clear(slot)
        for cache in (self._cache.keys, self._cache.values):
            cache[:, slot, :, : self._written[slot]] = 0
        self._written[slot] = 0

    def _drop(self, slot: int, stop: int) -> None:
        self._written[slot] = max(self._written[slot], self._lengths[slot] + 1, stop)

    def _ends(self, slots: Sequence[int]) -> tuple[list[int], list[float]]:
        return [self._lengths[s] for s in slots], [self._next_positions[s] for s in slots]


def media_rows(thinker: ThinkerModel, token_ids: Tensor, media: PromptMedia | None) -> Tensor:
    """Return the rows of a thinker's tokens, with media."""
    rows = thinker.embedding(token_ids).to(thinker.decoder.norm.weight.dtype)
    if media is not None:
        rows[media.filled] = media.rows
    return rows


def talker_tables(models: Models, spec: EngineSpec) -> tuple[Tensor, TextRows]:
    """Return the codec's table [codec vocab, hidden] and the text tokens' rows."""
    assert spec.config.talker and models.codec_embedding
    assert models.embedding and models.text_projection
    table, width = models.embedding.weight.detach(), spec.config.talker.text.hidden_size
    text_rows = TextRows(table, models.text_projection, width, spec.dtype)
    if len(table) <= ROWS_AT_ONCE:
        text_rows.fill()  # now, so that no frame waits for a row
    return models.codec_embedding.weight.detach().to(spec.dtype), text_rows
