"""NxDI's KV cache, with a decode step of one slot among several."""

import torch
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from torch import Tensor

from qwen3_omni_neuron.neuron.decoder.inputs import IDLE


class SlotKvCache(KVCacheManager):
    """A decode graph of fewer rows than the cache has lines reads and writes the lines that
    seq_ids name. An idle row reads the first line, and writes behind the positions of any slot,
    where NxDI's cache has room for it.

    NxDI's own reads all lines there, and writes zeros into the others, at the bucket's last
    position, where a longer slot has a key.
    """

    @property
    def _is_partial(self) -> bool:
        decodes = not self.neuron_config.is_prefill_stage
        return decodes and self.batch_size < self.kv_cache_batch_size

    def get_kv_by_layer_id(
        self, idx: int, seq_len: int, seq_ids: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().get_kv_by_layer_id(
            idx=idx, seq_len=seq_len, seq_ids=seq_ids, **kwargs
        )
        if not self._is_partial:
            return keys, values
        assert seq_ids is not None
        lines = _lines(seq_ids)
        return keys.index_select(0, lines), values.index_select(0, lines)

    def update_kv_by_layer_id(
        self,
        idx: int,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        kv_per_layer: tuple[Tensor, Tensor],
        seq_len: int,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """kv_per_layer: [B, kv_heads, 1, head_dim] each. Returns the whole layer's cache anew."""
        if not self._is_partial:
            return super().update_kv_by_layer_id(
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                seq_ids=seq_ids,
                position_ids=position_ids,
                kv_per_layer=kv_per_layer,
                seq_len=seq_len,
                **kwargs,
            )
        keys, values = self._fetch_cache(idx)
        new_keys, new_values = kv_per_layer
        heads = torch.arange(keys.shape[1], device=keys.device).view(1, -1, 1)
        behind = torch.full_like(position_ids, self.neuron_config.max_length)
        places = torch.where(seq_ids.view(-1, 1) == IDLE, behind, position_ids)
        at = (_lines(seq_ids).view(-1, 1, 1), heads, places.view(-1, 1, 1))
        indices = torch.broadcast_tensors(*(index.long() for index in at))
        return (
            torch.index_put(keys, indices, new_keys),
            torch.index_put(values, indices, new_values),
        )


def _lines(seq_ids: Tensor) -> Tensor:
    return seq_ids.clamp(min=0)
