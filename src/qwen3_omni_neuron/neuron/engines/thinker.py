"""The thinker on Neuron, over the slots of either target's decoder."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.engines.protocols import Fault
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import media_mask
from qwen3_omni_neuron.prompt.prompt import Prompt


class ThinkerSlots(Protocol):
    """The thinker's decoder over KV cache slots. chunked_prefill: see engines.protocols.Thinker."""

    slots: int
    context_length: int
    chunked_prefill: bool

    def prefill_tokens(
        self,
        slot: int,
        token_ids: Tensor,
        positions: Tensor,
        media: PromptMedia | None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Append tokens after the first `start` rows of a slot, and drop its later rows.

        token_ids: int64 [S]; positions: float32 [3, S]; media: the encoded media of these tokens.
        Returns logits [1, vocab] of the last row, and the accept layer's hidden states [S, hidden].
        """
        ...

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see engines.protocols.Thinker.copy."""
        ...

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""
        ...


class NeuronThinker:
    """The thinker's engine (see engines.protocols.Thinker).

    release: called at `close`, to release graphs and weights. fault: see engines.protocols.Fault;
    None where the graphs run in this process.
    """

    row_bytes = 0

    def __init__(
        self,
        config: OmniConfig,
        decoder: ThinkerSlots,
        media: MediaEncoders,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self.chunked_prefill = decoder.chunked_prefill
        self._config, self._decoder, self.media = config, decoder, media
        self._release, self.fault = release, fault

    @torch.inference_mode()
    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see Thinker.prefill."""
        ids, positions = prompt.token_ids[start:], prompt.positions[:, start:]
        media = self.media.rows(prompt, start, media)
        logits, accepted = self._decoder.prefill_tokens(slot, ids, positions, media, start)
        return logits, accepted[media_mask(ids, self._config)]

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see Thinker.copy."""
        self._decoder.copy(source, target, rows)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see Thinker.step."""
        return self._decoder.step_tokens(slots, token_ids)

    def close(self) -> None:
        """Release graphs and weights."""
        self._release()
