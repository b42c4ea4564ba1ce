"""The thinker engine in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.eager.slots import EagerSlots
from qwen3_omni_neuron.cpu.thinker import CpuThinker
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.thinker import Thinker


class EagerThinker(CpuThinker):
    """CpuThinker over model.thinker."""

    def __init__(
        self, config: OmniConfig, thinker: Thinker, media: MediaEncoders, slots: EagerSlots
    ):
        super().__init__(config, thinker, media, slots)
        self._decoder = slots

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see engines.protocols.Thinker.step."""
        logits: Tensor = self._decoder.step(slots, torch.tensor(token_ids))
        return logits
