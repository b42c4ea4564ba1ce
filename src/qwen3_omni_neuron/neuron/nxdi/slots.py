"""The slots of one decoder on NxDI: their lengths, the bucket of a call, and its idle rows."""

from collections.abc import Sequence

from torch import Tensor

from qwen3_omni_neuron.compilation.buckets import bucket_of
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.neuron.nxdi.inputs import IDLE, Media, decode_inputs, prefill_inputs
from qwen3_omni_neuron.neuron.nxdi.toolchain import DecoderGraphs, Outputs


class NxdiSlots:
    """The slots of a decoder's KV cache (see engines.protocols.DecoderSlots).

    The talker calls `prefill` and `step`, with rows; the thinker `prefill_tokens` and
    `step_tokens`.
    """

    def __init__(self, graphs: DecoderGraphs):
        self.slots, self.context_length = graphs.plan.slots, graphs.plan.context_length
        self._graphs, self._plan = graphs, graphs.plan
        self._lengths = [0] * self.slots
        self._next_positions = [0.0] * self.slots

    def prefill(self, slot: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0; see DecoderSlots.prefill."""
        inputs = prefill_inputs(slot, self._prompt_bucket(positions), positions, rows=rows)
        logits, hidden = self._fill(slot, inputs, positions)
        return logits, hidden[:, 0]

    def prefill_tokens(
        self, slot: int, token_ids: Tensor, positions: Tensor, media: Media
    ) -> tuple[Tensor, Tensor]:
        """Fill a slot from position 0.

        token_ids: int64 [S]; positions: float32 [3, S]. Returns logits [1, vocab] of the last row,
        and the captured hidden states [S, hidden].
        """
        bucket = self._prompt_bucket(positions)
        inputs = prefill_inputs(slot, bucket, positions, token_ids, media=media)
        logits, hidden = self._fill(slot, inputs, positions)
        return logits, hidden[0, : len(token_ids)]

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row to each slot; see DecoderSlots.step."""
        logits, hidden = self._step(slots, None, rows)
        return logits, hidden[:, 0]

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""
        return self._step(slots, token_ids, None)[0]

    def _prompt_bucket(self, positions: Tensor) -> int:
        return bucket_of(positions.shape[1], self._plan.prompt_buckets, "prompt rows")

    def _fill(self, slot: int, inputs: tuple[Tensor, ...], positions: Tensor) -> Outputs:
        outputs = self._graphs.prefill(inputs)
        self._lengths[slot] = positions.shape[1]
        self._next_positions[slot] = float(positions.max()) + 1
        return outputs

    def _step(
        self, slots: Sequence[int], token_ids: Sequence[int] | None, rows: Tensor | None
    ) -> Outputs:
        length = max(self._lengths[slot] for slot in slots)
        if length >= self.context_length:
            raise BucketError(
                f"a slot holds {length} positions, as many as its KV cache has. Shorten the "
                "conversation, or compile with a longer context."
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
        for slot in slots:
            self._lengths[slot] += 1
            self._next_positions[slot] += 1
        return logits[kept], hidden[kept]

    def _graph_rows(self, slots: Sequence[int]) -> tuple[list[int], list[int], slice | list[int]]:
        """Lay out slots as rows of the smallest decode graph that has enough.

        Returns for each row of the graph its slot, or IDLE; for each row the index of the one of
        `slots` whose inputs it has (an idle row has the inputs of the first); and the rows of
        `slots`, in order.

        In the graph of all slots, row i writes to slot i whatever its inputs say. Any other graph
        takes any slots in any order.
        """
        batch = bucket_of(len(slots), self._plan.batches, "slots")
        if batch < self.slots:
            idle = batch - len(slots)
            return [*slots, *[IDLE] * idle], [*range(len(slots)), *[0] * idle], slice(len(slots))
        index = {slot: index for index, slot in enumerate(slots)}
        seq_ids = [slot if slot in index else IDLE for slot in range(batch)]
        return seq_ids, [index.get(slot, 0) for slot in range(batch)], list(slots)
