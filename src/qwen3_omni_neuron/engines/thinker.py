"""The thinker engine of all targets, and code shared with the talker engine."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.engines.protocols import Fault, KvSlots, ThinkerSlots
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt


class SlotLengths:
    """Base of a target's DecoderSlots: counts rows and rope positions."""

    def __init__(self, slots: int):
        self.slots = slots
        self._lengths = [0] * slots
        self._next_positions = [0.0] * slots

    def clear(self, slot: int) -> None:
        """See Thinker.clear."""
        self._lengths[slot] = 0

    def _begin(self, slot: int, start: int) -> None:
        length = self._lengths[slot]
        assert start <= length, f"rows follow {start}, and slot {slot} holds {length}"
        # Only these rows are valid during the call, and if it fails.
        self._lengths[slot] = start

    def _end(self, slot: int, length: int, last_position: float) -> None:
        """Set a slot's length. last_position: its largest rope position."""
        self._lengths[slot], self._next_positions[slot] = length, last_position + 1

    def _count_step(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1


class DecoderEngine:
    """Base of the thinker and talker engines; see engines.protocols.

    release: called by `close`; frees resources besides memory. fault: None if the parts are in this
    process.
    """

    def __init__(
        self,
        decoder: KvSlots,
        release: Callable[[], None],
        fault: Fault | None,
    ):
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self.chunked_prefill = decoder.chunked_prefill
        self._kv_slots = decoder
        self._release, self.fault = release, fault

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """See Thinker.copy."""
        self._kv_slots.copy(source, target, rows)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """See Thinker.clear."""
        self._kv_slots.clear(slot)

    def close(self) -> None:
        """See Thinker.close."""
        self._release()


class ThinkerEngine(DecoderEngine):
    """A `Thinker` over a decoder's slots and the encoders of a prompt's media.

    No torch operation surrounds a decoder's call: see cpu.native.talker.NativeTalker.
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
        """See Thinker.prefill."""
        ids, positions = prompt.token_ids.numpy()[start:], prompt.positions.numpy()[:, start:]
        accepted = np.isin(ids, self._media_ids)
        media = self.media.rows(prompt, start, media) if accepted.any() else None
        return self._decoder.prefill_tokens(slot, ids, positions, start, media, accepted)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See Thinker.step."""
        return self._decoder.step_tokens(slots, token_ids)
