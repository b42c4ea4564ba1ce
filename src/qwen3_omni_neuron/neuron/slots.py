"""KV cache slots of the talker or thinker decoder, over graphs of neuron.graphs.decoders."""

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.thinker import SlotLengths
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.neuron.engines import Frame, in_places, pad_rows
from qwen3_omni_neuron.neuron.graphs.decoders import prompt_size
from qwen3_omni_neuron.neuron.graphs.graph import Outputs
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size


class GraphSlots(SlotLengths):
    """A decoder's KV cache slots (see engines.protocols.DecoderSlots) over a loaded part.

    A step writes recent rows, flushed into the cache's segments when full and before a prompt's
    rows (see model.kv_cache.Segments).
    """

    chunked_prefill = True

    def __init__(self, part: LoadedPart):
        self._part, name = part, part.name
        self._prompts = graphs_by_size(part, f"{name}_prefill", "window", "rows")
        self._flushes = graphs_by_size(part, f"{name}_flush", "window")
        self._steps = graphs_by_size(part, f"{name}_decode", "slots", "window")
        self._batches = sorted({slots for slots, _ in self._steps})
        self._windows = [window for (window,) in self._flushes]
        recent = next(iter(self._flushes.values())).state[0]
        super().__init__(recent.shape[0])
        self._recent_rows, self._dtype = recent.shape[3], recent.dtype
        self._held = [0] * self.slots  # rows of each slot in the segments
        # By slot, logits and hidden state of a row that the next step would append.
        self._ahead: dict[int, tuple[Tensor, Tensor]] = {}
        self.context_length = self._windows[-1]

    def prefill(
        self,
        slot: int,
        rows: Tensor,
        positions: Tensor,
        *,
        start: int = 0,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append rows after a slot's first `start` rows. Raises BucketError.

        deepstack: [layers, S, hidden], for the thinker's first layers.
        """
        if start + len(rows) > self.context_length:
            raise BucketError(
                f"{len(rows)} rows after {start} of a slot exceed its KV cache of "
                f"{self.context_length} positions. Shorten the conversation, or compile with a "
                "longer context."
            )
        if start > self._held[slot]:
            self._flush([slot])
        self._begin(slot, start)
        self._ahead.pop(slot, None)
        self._held[slot] = start
        rows, positions = rows.to(self._dtype), positions.float()
        logits, seen, begin = torch.empty(0), list[Tensor](), 0
        while begin < len(rows):
            graph = self._prompts[prompt_size(self._prompts, start + begin, len(rows) - begin)]
            size = graph.size("rows")
            stop = min(begin + size, len(rows))
            padding = size - (stop - begin)
            inputs: list[Tensor | None] = [
                pad_rows(rows[begin:stop], size),
                F.pad(positions[:, begin:stop], (0, padding)),
                torch.tensor([stop - begin - 1]),
                torch.tensor([slot]),
                torch.tensor([start + begin]),
            ]
            if self._part.name == "thinker":
                inputs.append(None)
                if deepstack is not None:
                    added = deepstack[:, begin:stop].to(self._dtype)
                    inputs[-1] = F.pad(added, (0, 0, 0, padding))
            logits, hidden = self._part.call(graph.label, *inputs)
            # Talker graphs return the last row's hidden state, thinker graphs every row's.
            seen = [hidden] if self._part.name == "talker" else [*seen, hidden[: stop - begin]]
            begin = stop
        self._held[slot] = start + len(rows)
        self._end(slot, start + len(rows), float(positions.max()))
        return logits, torch.cat(seen)

    def clear(self, slot: int) -> None:
        """See Thinker.clear."""
        super().clear(slot)
        self._held[slot] = 0
        self._renew(self.context_length, [0] * self.slots, slot, slot)

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the slot's whole window. The target needs a prefill before its next step."""
        length = self._lengths[source]
        assert rows <= length, f"{rows} rows to copy, and slot {source} holds {length}"
        if source != target:
            self._lengths[target] = self._held[target] = 0  # in case the call raises
            self._flush([source], target)
            self._held[target] = rows
        self._held[target] = min(self._held[target], rows)
        self._lengths[target] = rows

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append one row to each slot of the talker, where `step_ahead` has not."""
        if others := [index for index, slot in enumerate(slots) if slot not in self._ahead]:
            self.step_ahead([slots[index] for index in others], rows[others])
        logits, hidden = zip(*map(self._ahead.pop, slots), strict=True)
        return torch.stack(logits), torch.stack(hidden)

    def step_ahead(self, slots: Sequence[int], rows: Tensor, frame: Frame | None = None) -> Tensor:
        """Compute the next `step`, after a frame with text rows. Returns the frame's codes."""
        logits, hidden, codes = self._step(slots, rows.to(self._dtype), frame)
        self._ahead |= zip(slots, zip(logits, hidden, strict=True), strict=True)
        # A row that is not finite is none of the slot's, even if no step asks for it.
        self._count_step(list(compress(slots, (logits.amax(1) < torch.inf).tolist())))
        return codes

    def _step(self, slots: Sequence[int], rows: Tensor, frame: Frame | None = None) -> Outputs:
        longest = max(self._lengths[slot] for slot in slots)
        if longest >= self.context_length:
            raise BucketError(
                f"a slot's KV cache of {longest} positions is full. Shorten the conversation, "
                "or compile with a longer context."
            )
        # Only full ones: a long slot would require a longer window.
        if full := [slot for slot in slots if self._recent(slot) == self._recent_rows]:
            self._flush(full)
        batch = bucket_of(len(slots), self._batches, "slots")
        held = [self._held[slot] for slot in slots]
        graph = self._steps[batch, bucket_of(max(held), self._windows, "positions of a slot")]
        positions = [self._next_positions[slot] for slot in slots]
        counts = [self._recent(slot) for slot in slots]
        inputs = rows, *map(torch.tensor, (positions, held, counts, slots))
        # Row i is slot i where the graph computes all.
        places = inputs[-1] if batch == self.slots else torch.arange(len(slots))
        codes, step = graph.inputs[: -len(inputs)], graph.inputs[-len(inputs) :]
        padded = in_places(step, inputs, places)
        if frame is None:
            outputs = self._part.call(graph.label, *(c.idle_input() for c in codes), *padded)
        else:
            outputs = frame(places, padded, graph)
        return tuple(output[places] for output in outputs)

    def _recent(self, slot: int) -> int:
        return self._lengths[slot] - self._held[slot]

    def _flush(self, slots: Sequence[int], target: int | None = None) -> None:
        """Move recent rows into the segments. target: becomes a copy of the first slot."""
        longest = max(self._lengths[slot] for slot in slots)
        window = bucket_of(longest, self._windows, "positions of a slot")
        fit = [length <= window for length in self._lengths]
        counts = [self._recent(slot) if fits else 0 for slot, fits in enumerate(fit)]
        source = slots[0]
        self._renew(window, counts, source, source if target is None else target)

    def _renew(self, window: int, counts: list[int], source: int, target: int) -> None:
        self._part.call(
            self._flushes[(window,)].label,
            torch.tensor(self._held),
            torch.tensor(counts),
            torch.tensor([source]),
            torch.tensor([target]),
        )
        self._held = [n + count for n, count in zip(self._held, counts, strict=True)]


class GraphThinkerSlots(GraphSlots):
    """The thinker's slots over its part. embedding: [vocab, hidden], on the host."""

    def __init__(self, part: LoadedPart, embedding: Tensor):
        super().__init__(part)
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
        """See ThinkerSlots.prefill_tokens."""
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
        """See ThinkerSlots.step_tokens."""
        (logits,) = self._step(slots, torch.tensor(token_ids))
        self._count_step(slots)
        return logits
