"""KV cache slots of the talker's or thinker's decoder, over graphs of neuron.graphs.decoders."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.slots import SlotLengths
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.neuron.engines.encoders import pad_rows
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size

IDLE = -1  # length that a decode graph gets for a row without a slot


class GraphSlots(SlotLengths):
    """The slots of a decoder's KV cache (see engines.protocols.DecoderSlots) over a loaded part.

    name: "thinker" or "talker".
    """

    chunked_prefill = True

    def __init__(self, part: LoadedPart, name: str):
        self._part, self._name = part, name
        self._prompts = graphs_by_size(part, f"{name}_prefill", "window", "rows")
        self._steps = graphs_by_size(part, f"{name}_decode", "slots", "window")
        self._batches = sorted({slots for slots, _ in self._steps})
        self._windows = sorted({window for _, window in self._steps})
        super().__init__(self._batches[-1])
        self.context_length = self._windows[-1]
        all_slots = self._steps[self._batches[-1], self._windows[-1]]
        self._banks, self._slots_per_bank = all_slots.banks, all_slots.state[0].lengths[0]
        self._dtype = all_slots.outputs[0].dtype

    def prefill(
        self,
        slot: int,
        rows: Tensor,
        positions: Tensor,
        *,
        start: int = 0,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append rows after the first `start` rows of a slot; see DecoderSlots.prefill.

        deepstack: [layers, S, hidden], what the thinker's first layers add. Returns the graph's
        outputs without padding rows: for the thinker the accept layer's hidden states [S, hidden].
        Raises BucketError for more rows than the slot has positions left.
        """
        if start + len(rows) > self.context_length:
            raise BucketError(
                f"{len(rows)} rows follow {start} of a slot, and its KV cache has "
                f"{self.context_length} positions. Shorten the conversation, or compile with a "
                "longer context."
            )
        self._begin(slot, start)
        rows, positions = rows.to(self._dtype), positions.float()
        logits, seen, begin = torch.empty(0), list[Tensor](), 0
        while begin < len(rows):
            graph = self._prompt_graph(start + begin, len(rows) - begin)
            size = graph.size("rows")
            stop = min(begin + size, len(rows))
            padding = size - (stop - begin)
            inputs: list[Tensor | None] = [
                pad_rows(rows[begin:stop], size),
                F.pad(positions[:, begin:stop], (0, padding)),
                torch.tensor([stop - begin - 1]),
                torch.tensor([start + begin]),
            ]
            if self._name == "thinker":
                inputs.append(None)
                if deepstack is not None:
                    added = deepstack[:, begin:stop].to(self._dtype)
                    inputs[-1] = F.pad(added, (0, 0, 0, padding))
            logits, hidden = self._call(graph, [slot], inputs)
            # A talker graph returns the last row's hidden state, a thinker graph that of every row.
            seen = [hidden] if self._name == "talker" else [*seen, hidden[: stop - begin]]
            begin = stop
        self._end(slot, start + len(rows), float(positions.max()))
        return logits, torch.cat(seen)

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see DecoderSlots.copy.

        The graph copies the whole slot. The target needs a prefill before its next step.
        """
        length = self._lengths[source]
        assert rows <= length, f"{rows} rows to copy, and slot {source} holds {length}"
        if source != target:
            self._call(self._part.graphs[f"{self._name}_copy"], [source, target], [])
        self._lengths[target] = rows

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row to each slot of the talker; see DecoderSlots.step."""
        logits, hidden = self._step(slots, rows.to(self._dtype))
        return logits, hidden

    def _step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, ...]:
        lengths = [self._lengths[slot] for slot in slots]
        longest = max(lengths)
        if longest >= self.context_length:
            raise BucketError(
                f"a slot holds {longest} positions, as many as its KV cache has. Shorten the "
                "conversation, or compile with a longer context."
            )
        batch = bucket_of(len(slots), self._batches, "slots")
        window = bucket_of(longest + 1, self._windows, "positions of a slot")
        graph = self._steps[batch, window]
        banks, order = self._banks_of(graph, slots)
        names = []
        if _names_slots(graph):  # else its rows are all slots of the banks, in their order
            idle = graph.inputs[-1].idle
            names, order = [pad_rows(torch.tensor(order), batch, idle)], list(range(len(slots)))

        def placed(x: Tensor, idle: float = 0) -> Tensor:
            padded = torch.full((batch, *x.shape[1:]), idle, dtype=x.dtype)
            padded[order] = x
            return padded

        positions = torch.tensor([self._next_positions[slot] for slot in slots])
        inputs = placed(rows), placed(positions), placed(torch.tensor(lengths), IDLE)
        outputs = self._part.call(graph.label, *inputs, *names, banks=banks)
        self._count_step(slots)
        return tuple(output[order] for output in outputs)

    def _call(
        self, graph: Graph, slots: Sequence[int], inputs: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Call a graph that takes the numbers of all its slots, or none."""
        banks, places = self._banks_of(graph, slots)
        names = [torch.tensor(places)] if _names_slots(graph) else []
        return self._part.call(graph.label, *inputs, *names, banks=banks)

    def _banks_of(self, graph: Graph, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the banks that a graph takes for some slots, and each slot's place in them.

        Banks of other slots fill up what the graph takes: no tensor may be given twice.
        """
        each = self._slots_per_bank
        named = list(dict.fromkeys(slot // each for slot in slots))
        others = [bank for bank in range(self._banks) if bank not in named]
        banks = [*named, *others][: graph.banks]
        return banks, [banks.index(slot // each) * each + slot % each for slot in slots]

    def _prompt_graph(self, start: int, rows: int) -> Graph:
        """Return the graph for the next rows of a prompt, as many as it takes."""
        fitting = [
            (window, size) for window, size in self._prompts if start + min(size, rows) <= window
        ]
        whole = [(window, size) for window, size in fitting if size >= rows]
        # One call if a graph takes all rows; else as many rows as the largest graph takes.
        chosen = whole[0] if whole else max(fitting, key=lambda pair: (pair[1], -pair[0]))
        return self._prompts[chosen]


def _names_slots(graph: Graph) -> bool:
    return any(spec.name == "slots" for spec in graph.inputs)


class GraphThinkerSlots(GraphSlots):
    """The thinker's slots (see engines.protocols.ThinkerSlots) over its loaded part.

    embedding: the token embedding [vocab, hidden], on the host: a prompt's rows are looked up here.
    """

    def __init__(self, part: LoadedPart, embedding: Tensor):
        super().__init__(part, "thinker")
        self._embedding = embedding

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
        """Append tokens to the first `start` rows of a slot; see ThinkerSlots.prefill_tokens."""
        rows = self._embedding.index_select(0, torch.from_numpy(token_ids))
        added = None
        if media is not None:
            rows[media.filled] = media.rows
            added = media.added()
        places = torch.from_numpy(positions)
        logits, states = self.prefill(slot, rows, places, start=start, deepstack=added)
        return logits, states[torch.from_numpy(accepted)]

    @torch.inference_mode()
    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot. Returns logits [n, vocab]."""
        (logits,) = self._step(slots, torch.tensor(token_ids))
        return logits
