"""The thinker on Neuron: its decoder on NxDI, the encoders on whatever they run."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt
from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import media_mask
from qwen3_omni_neuron.neuron.nxdi.inputs import Media
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots


class NeuronThinker:
    """The thinker's engine (see engines.protocols.Thinker).

    decoder: its graphs capture the accept layer. release: called at `close`, to release graphs and
    weights.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: NxdiSlots,
        media: MediaEncoders,
        dtype: torch.dtype,
        release: Callable[[], None] = lambda: None,
    ):
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self._config, self._decoder, self._media, self._dtype = config, decoder, media, dtype
        self._release = release

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Fill a slot from its beginning; see Thinker.prefill."""
        ids = prompt.token_ids
        media = self._laid_out(len(ids), self._media.encode(prompt))
        logits, accepted = self._decoder.prefill_tokens(slot, ids, prompt.positions, media)
        return logits, accepted[media_mask(ids, self._config)]

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see Thinker.step."""
        return self._decoder.step_tokens(slots, token_ids)

    def close(self) -> None:
        """Release graphs and weights."""
        self._release()

    def _laid_out(self, length: int, encoded: PromptMedia | None) -> Media:
        """Put media at their rows of the prompt, 0 elsewhere."""
        c = self._config.thinker
        width, layers = c.text.hidden_size, len(c.vision.deepstack_layers)
        rows = torch.zeros(length, width, dtype=self._dtype)
        filled = torch.zeros(length, dtype=torch.bool)
        deepstack = torch.zeros(layers, length, width, dtype=self._dtype)
        if encoded is not None:
            filled = encoded.filled
            rows[filled] = encoded.rows
            deepstack[:, encoded.visual] = encoded.deepstack
        return Media(rows, filled, deepstack)
