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
from qwen3_omni_neuron.neuron.graphs.decoders import CHUNK_KIND
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size

IDLE = -1  # length that a decode graph gets for a row without a slot


class GraphSlots(SlotLengths):
    """The slots of a decoder's KV cache (see engines.protocols.DecoderSlots) over a loaded part.

    name: "thinker" or "talker". chunked_prefill: whether the part has the graphs for it.
    """

    def __init__(self, part: LoadedPart, name: str, chunked_prefill: bool):
        self.chunked_prefill = chunked_prefill
        self._part, self._name = part, name
        self._prompts = sorted(rows for (rows,) in graphs_by_size(part, f"{name}_prefill", "rows"))
        self._steps = graphs_by_size(part, f"{name}_decode", "slots", "window")
        self._batches = sorted({slots for slots, _ in self._steps})
        self._windows = sorted({window for _, window in self._steps})
        self._prefill_chunks: list[tuple[int, int]] = []  # (window, rows), ascending
        if chunked_prefill:
            sizes = graphs_by_size(part, f"{name}_{CHUNK_KIND}", "window", "rows")
            self._prefill_chunks = [(window, rows) for window, rows in sizes]
        segments = [spec.lengths for spec in list(self._steps.values())[-1].state]
        super().__init__(segments[0][0])
        self.context_length = sum(positions for *_, positions, _ in segments)
        self._dtype = next(iter(self._steps.values())).outputs[0].dtype

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
        Raises BucketError for more rows than a graph takes or than the slot has positions left.
        """
        self._begin(slot, start)
        rows, positions = rows.to(self._dtype), positions.float()
        logits, seen, begin = torch.empty(0), list[Tensor](), 0
        while begin < len(rows):
            size, window = self._prompt_size(start + begin, len(rows) - begin)
            stop = min(begin + size, len(rows))
            inputs = [
                pad_rows(rows[begin:stop], size),
                F.pad(positions[:, begin:stop], (0, size - (stop - begin))),
                torch.tensor([stop - begin - 1]),
                torch.tensor([slot]),
            ]
            kind, sizes = "prefill", f"rows={size}"
            if window:
                kind, sizes = CHUNK_KIND, f"rows={size},window={window}"
                inputs.append(torch.tensor([start + begin]))
            if deepstack is not None:
                kind += "_visual"
                padding = (0, 0, 0, size - (stop - begin))
                inputs.append(F.pad(deepstack[:, begin:stop].to(self._dtype), padding))
            logits, hidden = self._part.call(f"{self._name}_{kind}[{sizes}]", *inputs)
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
        self._part.call(f"{self._name}_copy", torch.tensor([source]), torch.tensor([target]))
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
        positions = torch.tensor([self._next_positions[slot] for slot in slots])
        outputs = self._part.call(
            self._steps[batch, window].label,
            pad_rows(rows, batch),
            pad_rows(positions, batch),
            pad_rows(torch.tensor(slots), batch),
            pad_rows(torch.tensor(lengths), batch, IDLE),
        )
        self._count_step(slots)
        return tuple(output[: len(slots)] for output in outputs)

    def _prompt_size(self, start: int, rows: int) -> tuple[int, int]:
        """Return rows and window of the graph for the next rows; window 0: a whole-prompt graph."""
        if not start:
            return bucket_of(rows, self._prompts, "prompt rows"), 0
        fitting = [
            (window, size)
            for window, size in self._prefill_chunks
            if start + min(size, rows) <= window
        ]
        if not fitting:
            raise BucketError(
                f"{rows} rows follow {start} of a slot, and its KV cache has "
                f"{self.context_length} positions. Shorten the conversation."
            )
        whole = [(window, size) for window, size in fitting if size >= rows]
        # One call if a graph takes all rows; else as many rows as the largest graph takes.
        window, size = whole[0] if whole else max(fitting, key=lambda pair: (pair[1], -pair[0]))
        return size, window


class GraphThinkerSlots(GraphSlots):
    """The thinker's slots (see engines.protocols.ThinkerSlots) over its loaded part.

    embedding: the token embedding [vocab, hidden], on the host: a prompt's rows are looked up here.
    """

    def __init__(self, part: LoadedPart, chunked_prefill: bool, embedding: Tensor):
        super().__init__(part, "thinker", chunked_prefill)
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
