"""The slots of one decoder on NxDI: where each stands, which bucket it takes, and what is idle."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from qwen3_omni_neuron.compilation.buckets import bucket_of
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.neuron.nxdi.inputs import IDLE, Inputs, Media, decode_inputs, prefill_inputs
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan

Outputs = tuple[Tensor, Tensor]
"""Logits [B, vocab] and the captured hidden states [B, rows, hidden] of one call."""


class DecoderGraphs(Protocol):
    """A decoder's compiled graphs (see neuron.application), with its KV cache inside."""

    plan: DecoderPlan

    def prefill(self, inputs: Inputs) -> Outputs: ...

    def decode(self, inputs: Inputs) -> Outputs:
        """inputs: of as many rows as one of the plan's batches says. In the graph of all slots, row
        i is slot i or IDLE."""
        ...

    def close(self) -> None:
        """Give back graphs, weights and KV cache."""
        ...


class NxdiSlots:
    """Serves engine.decoder.DecoderSlots over NxDI, and the thinker's two calls beside it."""

    def __init__(self, graphs: DecoderGraphs):
        self.slots, self.context_length = graphs.plan.slots, graphs.plan.context_length
        self._graphs, self._plan = graphs, graphs.plan
        self._lengths = [0] * self.slots
        self._next_positions = [0.0] * self.slots

    def prefill(self, slot: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As engine.decoder.DecoderSlots.prefill."""
        inputs = prefill_inputs(slot, self._prompt_bucket(positions), positions, rows=rows)
        logits, hidden = self._fill(slot, inputs, positions)
        return logits, hidden[:, 0]

    def prefill_tokens(
        self, slot: int, token_ids: Tensor, positions: Tensor, media: Media
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0. token_ids: int64 [S]; positions: float32 [3, S]. Returns
        logits [1, vocab] of the last row, and the captured layer's hidden states [S, hidden]."""
        bucket = self._prompt_bucket(positions)
        inputs = prefill_inputs(slot, bucket, positions, token_ids, media=media)
        logits, hidden = self._fill(slot, inputs, positions)
        return logits, hidden[0, : len(token_ids)]

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """As engine.decoder.DecoderSlots.step."""
        logits, hidden = self._step(slots, None, rows)
        return logits, hidden[:, 0]

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""
        return self._step(slots, token_ids, None)[0]

    def _prompt_bucket(self, positions: Tensor) -> int:
        return bucket_of(positions.shape[1], self._plan.prompt_buckets, "prompt rows")

    def _fill(self, slot: int, inputs: Inputs, positions: Tensor) -> Outputs:
        outputs = self._graphs.prefill(inputs)
        self._lengths[slot] = positions.shape[1]
        self._next_positions[slot] = float(positions.max()) + 1
        return outputs

    def _step(
        self, slots: Sequence[int], token_ids: Sequence[int] | None, rows: Tensor | None
    ) -> Outputs:
        held = max(self._lengths[slot] for slot in slots)
        if held >= self.context_length:
            raise BucketError(
                f"a slot holds {held} positions, as many as its KV cache has. Shorten the "
                "conversation, or compile with a longer context."
            )
        bucket = bucket_of(held, self._plan.decode_buckets, "positions of a slot")
        lines, order, kept = self._laid_out(slots)
        if token_ids is not None:
            token_ids = [token_ids[place] for place in order]
        if rows is not None:
            rows = rows[order]
        held_by = [slots[place] for place in order]
        inputs = self._inputs(lines, held_by, bucket, token_ids, rows)
        logits, hidden = self._graphs.decode(inputs)
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1
        return logits[kept], hidden[kept]

    def _laid_out(self, slots: Sequence[int]) -> tuple[list[int], list[int], slice | list[int]]:
        """The rows of the smallest decode graph that takes these slots. For each row: its slot, or
        IDLE, and which of `slots` fills it (an idle row is one of them again, and is thrown away).
        For all of `slots`: their rows.

        Row i of the graph of all slots is line i of the cache, whatever its inputs say; any other
        graph takes any slots in any order.
        """
        batch = bucket_of(len(slots), self._plan.batches, "slots")
        if batch < self.slots:
            idle = batch - len(slots)
            return [*slots, *[IDLE] * idle], [*range(len(slots)), *[0] * idle], slice(len(slots))
        place = {slot: index for index, slot in enumerate(slots)}
        lines = [slot if slot in place else IDLE for slot in range(batch)]
        return lines, [place.get(slot, 0) for slot in range(batch)], list(slots)

    def _inputs(
        self,
        lines: Sequence[int],
        slots: Sequence[int],
        bucket: int,
        token_ids: Sequence[int] | None,
        rows: Tensor | None,
    ) -> Inputs:
        """lines: of the cache, or IDLE; slots: whose length and position each row takes."""
        lengths = [self._lengths[slot] for slot in slots]
        positions = [self._next_positions[slot] for slot in slots]
        return decode_inputs(lines, bucket, lengths, positions, token_ids, rows)
