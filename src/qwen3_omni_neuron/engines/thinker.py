"""The thinker engine: one for all targets, over a decoder and media encoders of the target."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.engines.protocols import Fault, ThinkerSlots
from qwen3_omni_neuron.engines.slots import DecoderEngine
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt


class ThinkerEngine(DecoderEngine):
    """A `Thinker` over a decoder's slots and the encoders of a prompt's media.

    No torch operation is beside a decoder's call: see cpu.native.talker.NativeTalker.
    release, fault: see DecoderEngine.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: ThinkerSlots,
        media: MediaEncoders,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        super().__init__(decoder, release, fault)
        self._media_ids, self._decoder, self.media = config.thinker.media_token_ids, decoder, media

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see Thinker.prefill."""
        ids, positions = prompt.token_ids.numpy()[start:], prompt.positions.numpy()[:, start:]
        accepted = np.isin(ids, self._media_ids)
        media = self.media.rows(prompt, start, media) if accepted.any() else None
        return self._decoder.prefill_tokens(slot, ids, positions, start, media, accepted)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see Thinker.step."""
        return self._decoder.step_tokens(slots, token_ids)
