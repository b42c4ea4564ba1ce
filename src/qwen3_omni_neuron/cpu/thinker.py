"""The thinker on the CPU."""

import torch
from torch import Tensor

from qwen3_omni_neuron.config import ThinkerConfig
from qwen3_omni_neuron.cpu.graph import Numbers, trace_graph
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, pack_windows
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.prompt import Prompt


class CpuThinker:
    """Serves runtime.protocols.Thinker over model.thinker and model.audio_encoder."""

    def __init__(
        self,
        config: ThinkerConfig,
        thinker: Thinker,
        encoder: AudioEncoder,
        slots: int,
        context_length: int,
    ):
        self.slots, self.context_length = slots, context_length
        self._config, self._thinker, self._encoder = config, thinker, encoder
        dtype = thinker.embedding.weight.dtype
        self._cache = KvCache.zeros(config.text, slots, context_length, dtype)
        self._lengths = [0] * slots
        self._next_positions = [0] * slots
        self._number = Numbers(max(context_length, config.text.vocab_size))
        one = self._number(1)
        window = self._cache.lines(0, 1).window(2)
        self._decode = trace_graph(
            thinker, thinker.decode, one, one, one, window.keys, window.values
        )

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        rows = self._thinker.embedding(prompt.token_ids)
        if prompt.audio_mel:
            rows[prompt.token_ids == self._config.audio_token_id] = self._encode(prompt)
        line = self._cache.lines(slot, slot + 1)
        logits, accepted = self._thinker.prefill(rows, prompt.positions, line)
        self._lengths[slot] = len(prompt)
        self._next_positions[slot] = int(prompt.positions.max()) + 1
        return logits, accepted

    @torch.inference_mode()
    def step(self, slot: int, token_id: int) -> Tensor:
        length = self._lengths[slot]
        window = self._cache.lines(slot, slot + 1).window(length + 1)
        logits, _ = self._decode(
            self._number(token_id),
            self._number(self._next_positions[slot]),
            self._number(length),
            window.keys,
            window.values,
        )
        self._lengths[slot] += 1
        self._next_positions[slot] += 1
        return logits

    def _encode(self, prompt: Prompt) -> Tensor:
        """Rows [audio tokens, hidden] of all clips, in order."""
        mel, valid, chunk_width = pack_windows(prompt.audio_mel, self._config.audio)
        return self._encoder(mel.to(self._encoder.fc2.weight.dtype), valid, chunk_width)[valid]
