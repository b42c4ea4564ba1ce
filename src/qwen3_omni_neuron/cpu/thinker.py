"""The thinker on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.cpu.slots import Numbers, Slots
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, pack_windows
from qwen3_omni_neuron.model.talker_prompt import media_mask
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.prompt import Prompt


class CpuThinker:
    """Serves runtime.protocols.Thinker over model.thinker and model.audio_encoder."""

    def __init__(
        self,
        config: OmniConfig,
        thinker: Thinker,
        encoder: AudioEncoder,
        slots: int,
        context_length: int,
    ):
        self.slots, self.context_length = slots, context_length
        self._config, self._thinker, self._encoder = config, thinker, encoder
        self._number = Numbers(config.thinker.text.vocab_size)
        self._slots = Slots(
            config.thinker.text,
            thinker,
            self._number(1),
            slots,
            context_length,
            thinker.embedding.weight.dtype,
        )

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        rows = self._thinker.embedding(prompt.token_ids)
        if prompt.audio_mel:
            rows[prompt.token_ids == self._config.thinker.audio_token_id] = self._encode(prompt)
        logits, accepted = self._slots.prefill(slot, rows, prompt.positions)
        return logits, accepted[media_mask(prompt.token_ids, self._config)]

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        if len(slots) == 1:
            return self._slots.step(slots, self._number(token_ids[0]))
        return self._slots.step(slots, torch.tensor(token_ids))

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the engine."""

    def _encode(self, prompt: Prompt) -> Tensor:
        """Rows [audio tokens, hidden] of all clips, in order."""
        audio = self._config.thinker.audio
        mel, valid, chunk_width = pack_windows(prompt.audio_mel, audio)
        return self._encoder(mel.to(self._encoder.fc2.weight.dtype), valid, chunk_width)[valid]
