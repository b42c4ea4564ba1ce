"""The thinker engine on the CPU, as far as C and torch have it in common."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.engines.protocols import Fault
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import media_mask
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.prompt.prompt import Prompt


class CpuThinker:
    """Thinker over slots and the media encoders; see engines.protocols.Thinker.

    thinker: has the table of embeddings, and the type of the rows.
    """

    chunked_prefill = True
    fault: Fault | None = None

    def __init__(self, config: OmniConfig, thinker: Thinker, media: MediaEncoders, slots: Slots):
        self.slots, self.context_length = slots.slots, slots.context_length
        self._config, self._thinker, self.media, self._slots = config, thinker, media, slots
        self._dtype = thinker.decoder.norm.weight.dtype
        self.row_bytes = slots.row_bytes

    @torch.inference_mode()
    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see engines.protocols.Thinker.prefill."""
        ids, positions = prompt.token_ids[start:], prompt.positions[:, start:]
        rows = self._thinker.embedding(ids).to(self._dtype)
        visual: tuple[Tensor, ...] = ()
        media = self.media.rows(prompt, start, media)
        if media is not None:
            rows[media.filled] = media.rows
            visual = media.visual, media.deepstack
        logits, accepted = self._slots.prefill(slot, rows, positions, *visual, start=start)
        return logits, accepted[: len(ids)][media_mask(ids, self._config)]

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see engines.protocols.Thinker.copy."""
        self._slots.copy(source, target, rows)

    @torch.inference_mode()
    def read_rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Copy rows of a slot to the host's memory; see engines.protocols.HostRows."""
        return self._slots.read_rows(slot, start, stop)

    @torch.inference_mode()
    def write_rows(self, slot: int, start: int, rows: Tensor) -> None:
        """Copy rows back into a slot; see engines.protocols.HostRows."""
        self._slots.write_rows(slot, start, rows)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see engines.protocols.Thinker.step."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: the engine holds only memory, which is freed with it."""
