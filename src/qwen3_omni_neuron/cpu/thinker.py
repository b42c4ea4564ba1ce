"""The thinker on the CPU."""

import torch
from torch import Tensor

from qwen3_omni_neuron.config import ThinkerConfig
from qwen3_omni_neuron.cpu.slots import Numbers, Slots
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, pack_windows
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
        self._number = Numbers(config.text.vocab_size)
        self._slots = Slots(
            config.text,
            thinker,
            thinker.decode,
            self._number(1),
            slots,
            context_length,
            thinker.embedding.weight.dtype,
        )

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        rows = self._thinker.embedding(prompt.token_ids)
        if prompt.audio_mel:
            rows[prompt.token_ids == self._config.audio_token_id] = self._encode(prompt)
        line = self._slots.line(slot)
        logits, accepted = self._thinker.prefill(rows, prompt.positions, line)
        self._slots.filled(slot, prompt.positions)
        return logits, accepted

    @torch.inference_mode()
    def step(self, slot: int, token_id: int) -> Tensor:
        logits, _ = self._slots.step(slot, self._number(token_id))
        return logits

    def _encode(self, prompt: Prompt) -> Tensor:
        """Rows [audio tokens, hidden] of all clips, in order."""
        mel, valid, chunk_width = pack_windows(prompt.audio_mel, self._config.audio)
        return self._encoder(mel.to(self._encoder.fc2.weight.dtype), valid, chunk_width)[valid]
