"""The thinker engine in C."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.slots import NativeSlots
from qwen3_omni_neuron.cpu.thinker import CpuThinker
from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import has_media
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.prompt.prompt import Prompt


class NativeThinker(CpuThinker):
    """CpuThinker with one call of C for each step, and for each prompt without media.

    No torch operation is beside these calls: see cpu.native.talker.NativeTalker.
    """

    def __init__(
        self, config: OmniConfig, thinker: Thinker, media: MediaEncoders, slots: NativeSlots
    ):
        super().__init__(config, thinker, media, slots)
        self._decoder = slots
        self._none_accepted = torch.empty(0, config.thinker.text.hidden_size)

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see engines.protocols.Thinker.prefill."""
        ids = prompt.token_ids.numpy()[start:]
        if has_media(ids, self._config):
            return super().prefill(slot, prompt, start, media)
        positions = prompt.positions.numpy()[:, start:]
        return self._decoder.prefill_ids(slot, ids, positions, start), self._none_accepted

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see engines.protocols.Thinker.step."""
        return self._decoder.step_ids(slots, token_ids)
