"""Thinker engine on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt
from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.engines.inputs import Numbers
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker_prompt import media_mask
from qwen3_omni_neuron.model.thinker import Thinker


class CpuThinker:
    """Thinker over model.thinker and the media encoders; see engines.protocols.Thinker."""

    def __init__(
        self,
        config: OmniConfig,
        thinker: Thinker,
        media: MediaEncoders,
        slots: int,
        context_length: int,
        prompt_buckets: Sequence[int] = (),
    ):
        self.slots, self.context_length = slots, context_length
        self._config, self._thinker, self._media = config, thinker, media
        width, dtype = config.thinker.text.hidden_size, thinker.embedding.weight.dtype
        layers = len(config.thinker.vision.deepstack_layers)
        self._no_visual = (
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(layers, 0, width, dtype=dtype),
        )
        self._number = Numbers(config.thinker.text.vocab_size)
        self._slots = Slots(
            config.thinker.text,
            thinker,
            self._number(1),
            slots,
            context_length,
            dtype,
            prompt_buckets,
            self._no_visual,
        )

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0; see engines.protocols.Thinker.prefill."""
        ids = prompt.token_ids
        rows = self._thinker.embedding(ids)
        visual, deepstack = self._no_visual
        media = self._media.encode(prompt)
        if media is not None:
            rows[media.filled] = media.rows
            visual, deepstack = media.visual, media.deepstack
        logits, accepted = self._slots.prefill(slot, rows, prompt.positions, visual, deepstack)
        return logits, accepted[: len(ids)][media_mask(ids, self._config)]

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see engines.protocols.Thinker.step."""
        if len(slots) == 1:
            return self._slots.step(slots, self._number(token_ids[0]))
        return self._slots.step(slots, torch.tensor(token_ids))

    def close(self) -> None:
        """Do nothing: the engine holds only memory, which is freed with it."""
