"""Slots of talker and thinker on NxDI."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.thinker import SlotLengths
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import (
    IDLE,
    Media,
    Outputs,
    decode_inputs,
    prefill_example,
    prefill_inputs,
)
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import DecoderGraphs

NO_CHUNKED_PREFILL = "NxDI computes each prompt as a whole, without an earlier one's rows"


class NxdiSlots(SlotLengths):
    """A decoder's KV cache slots (see engines.protocols.DecoderSlots)."""

    chunked_prefill = False  # NxDI's prompt graphs begin at position 0

    def __init__(self, graphs: DecoderGraphs):
        super().__init__(graphs.spec.plan.max_concurrency)
        self._graphs, self._plan = graphs, graphs.spec.plan
        self.context_length = self._plan.context_length

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0; see DecoderSlots.prefill."""
        assert not start, NO_CHUNKED_PREFILL
        inputs = prefill_inputs(slot, self._prompt_bucket(positions), positions, rows=rows)
        logits, hidden = self._fill(slot, inputs, positions)
        return logits, hidden[:, 0]

    def copy(self, source: int, target: int, rows: int) -> None:
        """Raise: see engines.protocols.Thinker."""
        raise AssertionError(NO_CHUNKED_PREFILL)

    def clear(self, slot: int) -> None:
        """Drop a slot's rows, and write finite ones; see Thinker.clear.

        A prompt padded to the longest bucket overwrites earlier prompts' rows. Of a reply's rows
        only the last may be non-finite; the talker's may follow the prompt.
        """
        spec, length = self._graphs.spec, self._lengths[slot]
        longest = self._plan.prompt_buckets[-1]
        super().clear(slot)
        width = spec.decoder.hidden_size
        layers = None if spec.takes_rows else spec.deepstack_layers
        self._graphs.prefill(prefill_example(longest, width, spec.dtype, layers, slot))
        if length > longest:
            seq_ids, order, _ = self._graph_rows([slot])
            rows = torch.zeros(len(order), width, dtype=spec.dtype)
            # The row sees the shortest window, filled by the prompt.
            ends = [length - 1] * len(order)
            window = self._plan.decode_buckets[0]
            self._graphs.decode(decode_inputs(seq_ids, window, ends, ends, rows=rows))

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """See DecoderSlots.step."""
        logits, hidden = self._step(slots, None, rows)
        return logits, hidden[:, 0]

    def _prompt_bucket(self, positions: Tensor) -> int:
        return bucket_of(positions.shape[1], self._plan.prompt_buckets, "prompt rows")

    def _fill(self, slot: int, inputs: tuple[Tensor, ...], positions: Tensor) -> Outputs:
        outputs = self._graphs.prefill(inputs)
        self._end(slot, positions.shape[1], float(positions.max()))
        return outputs

    def _step(
        self, slots: Sequence[int], token_ids: Sequence[int] | None, rows: Tensor | None
    ) -> Outputs:
        length = max(self._lengths[slot] for slot in slots)
        if length >= self.context_length:
            raise BucketError(
                f"a slot's KV cache of {length} positions is full. Shorten the conversation, or "
                "compile with a longer context."
            )
        seq_ids, order, kept = self._graph_rows(slots)
        row_slots = [slots[index] for index in order]
        inputs = decode_inputs(
            seq_ids,
            bucket_of(length, self._plan.decode_buckets, "positions of a slot"),
            [self._lengths[slot] for slot in row_slots],
            [self._next_positions[slot] for slot in row_slots],
            None if token_ids is None else [token_ids[index] for index in order],
            None if rows is None else rows[order],
        )
        logits, hidden = self._graphs.decode(inputs)
        self._count_step(slots)
        return logits[kept], hidden[kept]

    def _graph_rows(self, slots: Sequence[int]) -> tuple[list[int], list[int], slice | list[int]]:
        """Assign slots to rows of the smallest sufficient decode graph.

        Returns each row's slot or IDLE, its index in `slots`, and the rows of `slots`. In the graph
        of all slots, row i is slot i.
        """
        batch = bucket_of(len(slots), self._plan.batches, "slots")
        if batch < self.slots:
            idle = batch - len(slots)
            return [*slots, *[IDLE] * idle], [*range(len(slots)), *[0] * idle], slice(len(slots))
        index = {slot: index for index, slot in enumerate(slots)}
        seq_ids = [slot if slot in index else IDLE for slot in range(batch)]
        return seq_ids, [index.get(slot, 0) for slot in range(batch)], list(slots)


class NxdiThinkerSlots(NxdiSlots):
    """The thinker's slots (see engines.protocols.ThinkerSlots)."""

    def __init__(self, graphs: DecoderGraphs, config: OmniConfig):
        super().__init__(graphs)
        self._config = config.thinker

    @torch.inference_mode()
    def prefill_tokens(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        media: PromptMedia | None,
        accepted: NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0; see ThinkerSlots.prefill_tokens."""
        assert not start, NO_CHUNKED_PREFILL
        ids, places = torch.from_numpy(token_ids), torch.from_numpy(positions)
        laid_out, bucket = self._laid_out(len(ids), media), self._prompt_bucket(places)
        inputs = prefill_inputs(slot, bucket, places, ids, media=laid_out)
        logits, hidden = self._fill(slot, inputs, places)
        return logits, hidden[0, : len(ids)][torch.from_numpy(accepted)]

    @torch.inference_mode()
    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See ThinkerSlots.step_tokens."""
        return self._step(slots, token_ids, None)[0]

    def _laid_out(self, length: int, encoded: PromptMedia | None) -> Media:
        c, dtype = self._config, self._graphs.spec.dtype
        width, layers = c.text.hidden_size, len(c.vision.deepstack_layers)
        rows = torch.zeros(length, width, dtype=dtype)
        filled = torch.zeros(length, dtype=torch.bool)
        deepstack = torch.zeros(layers, length, width, dtype=dtype)
        if encoded is not None:
            filled = encoded.filled
            rows[filled] = encoded.rows
            deepstack[:, encoded.visual] = encoded.deepstack
        return Media(rows, filled, deepstack)
