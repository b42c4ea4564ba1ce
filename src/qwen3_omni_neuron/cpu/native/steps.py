"""Decode steps and prompts of thinker and talker in C, and their slots."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    NO_SUCH_ROW,
    Fields,
    Library,
    Pointer,
    Weights,
    address_of,
    check,
    empty_floats,
    native_decoder,
    pointer_to,
    table_of,
)
from qwen3_omni_neuron.cpu.slots import CpuSlots, media_rows
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel


class NativeSteps:
    """`decode` and `prefill` of a thinker or a talker over a KV cache, in C and float32.

    A row's result does not depend on the call's other rows, the number of threads, or a prompt's
    split. Several threads may call it for different slots. Raises UnsuitedError.
    """

    def __init__(
        self,
        c: DecoderConfig,
        model: ThinkerModel | TalkerModel,
        cache: KvCache,
        library: Library,
        threads: int = 1,
    ):
        self._decode, self._prefill = library.decode_step, library.prefill
        self._weights = weights = Weights()
        self._thinker = model if isinstance(model, ThinkerModel) else None
        head = model.head if isinstance(model, ThinkerModel) else model.codec_head
        self._vocab, self._hidden = head.out_features, c.hidden_size
        self._slots, self._positions = cache.keys.shape[1], cache.keys.shape[3]
        shape = (c.layers, self._slots, c.kv_heads, self._positions, c.head_dim)
        half = c.head_dim // 2
        if self._thinker is not None:
            embedding = weights.table(self._thinker.embedding.weight, self._vocab, c.hidden_size)
            self._embedding = ffi.new("Table *", embedding)
        self._nothing_added = ffi.new("Deepstack *")
        fields = {
            "decoder": native_decoder(c, model.decoder, weights),
            "kv": {
                "keys": weights(cache.keys, *shape),
                "values": weights(cache.values, *shape),
                "slots": self._slots,
                "positions": self._positions,
            },
            "head": weights.matrix(head, "weight", self._vocab, c.hidden_size),
            "frequencies": weights(model.rotary.frequencies[:half], half),
            "axis": weights(model.rotary.axis[:half], half, dtype=torch.int64),
            "threads": threads,
        }
        self._stepper = ffi.new("Stepper *", fields)

    def decode(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[float],
        ids: Sequence[int],
        table: Pointer | None = None,
        added: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Append one row of a table to each of several slots. Returns the logits [slots, vocab].

        lengths: each slot's filled positions. positions: the new rows' rope positions. ids: rows of
        the table [.., hidden], default: the thinker's embedding. added: float32 [all slots,
        hidden], added to the new rows. hidden: float32 [all slots, hidden], receives post-norm
        hidden states.
        """
        count = len(slots)
        self._check_slots(slots, min(lengths), max(lengths) + 1)
        shape = self._slots, self._hidden
        logits = torch.from_numpy(np.empty((count, self._vocab), np.float32))
        status = self._decode(
            self._stepper,
            count,
            list(slots),
            list(lengths),
            list(positions),
            self._embedding if table is None else table,
            list(ids),
            ffi.NULL if added is None else pointer_to(added, torch.float32, *shape),
            address_of(logits),
            ffi.NULL if hidden is None else pointer_to(hidden, torch.float32, *shape),
        )
        if status == NO_SUCH_ROW:
            raise IndexError(f"rows {list(ids)} of a table that has fewer")
        check(status)
        return logits

    def prefill(
        self,
        slot: int,
        start: int,
        rows: Tensor,
        positions: Tensor,
        visual: Tensor | None = None,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append the rows [S, hidden] of a prompt after a slot's first `start`.

        positions: float32 [3, S]; visual (ascending), deepstack: see model.thinker.
        """
        count = len(rows)
        if count == 0:
            raise ValueError("a prompt of no rows has no last row")
        self._check_slots((slot,), start, start + count)
        # References that live until the call returns.
        positions = positions.contiguous()
        logits, hidden = empty_floats(1, self._vocab), empty_floats(1, self._hidden)
        accept_layer, accepted = 0, empty_floats(0)
        if self._thinker is not None:
            accept_layer, accepted = self._thinker.accept_layer, empty_floats(count, self._hidden)
        added = self._nothing_added
        if visual is not None and deepstack is not None:
            layers, places = len(deepstack), len(visual)
            _check_visual(visual.tolist(), count)
            deepstack = deepstack.contiguous()
            fields: Fields = {
                "layers": layers,
                "count": places,
                "rows": pointer_to(visual, torch.int64, places),
                "features": pointer_to(deepstack, torch.float32, layers, places, self._hidden),
            }
            added = ffi.new("Deepstack *", fields)
        status = self._prefill(
            self._stepper,
            slot,
            start,
            count,
            pointer_to(positions, torch.float32, 3, count),
            ffi.NULL,
            ffi.NULL,
            0,
            pointer_to(rows, torch.float32, count, self._hidden),
            added,
            accept_layer,
            ffi.NULL if self._thinker is None else address_of(accepted),
            address_of(logits),
            address_of(hidden),
        )
        check(status)
        return logits, hidden if self._thinker is None else accepted

    def prefill_ids(
        self,
        slot: int,
        start: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        table: Pointer | None = None,
        after: Tensor | None = None,
        wants_logits: bool = True,
    ) -> Tensor:
        """Append rows of a table, then the rows `after`, to a slot's first `start`.

        ids: int64 [n], of the table [.., hidden], default: the thinker's embedding. after: float32
        [m, hidden]. positions: float32 [3, n + m]. Returns the last row's logits [1, vocab], or [0,
        vocab] if not wanted. Raises IndexError, ValueError, and MemoryError.
        """
        # No torch operation: see cpu.native.talker.NativeTalker.
        ids, positions = np.ascontiguousarray(ids), np.ascontiguousarray(positions)
        more = 0 if after is None else len(after)
        count = len(ids) + more
        if count == 0:
            raise ValueError("a prompt of no rows has no last row")
        if ids.dtype != np.int64 or positions.dtype != np.float32 or positions.shape != (3, count):
            raise ValueError(
                f"the C takes int64 ids and positions float32 [3, {count}] here, got {ids.dtype} "
                f"and {positions.dtype} {list(positions.shape)}"
            )
        self._check_slots((slot,), start, start + count)
        logits = torch.from_numpy(np.empty((int(wants_logits), self._vocab), np.float32))
        hidden = np.empty(self._hidden, np.float32)
        status = self._prefill(
            self._stepper,
            slot,
            start,
            count,
            ffi.from_buffer("float[]", positions),
            self._embedding if table is None else table,
            ffi.from_buffer("int64_t[]", ids),
            len(ids),
            ffi.NULL if after is None else pointer_to(after, torch.float32, more, self._hidden),
            self._nothing_added,
            0,
            ffi.NULL,
            address_of(logits) if wants_logits else ffi.NULL,
            ffi.from_buffer("float[]", hidden),
        )
        if status == NO_SUCH_ROW:
            raise IndexError(f"ids {ids.min()} to {ids.max()} of a table that has fewer rows")
        check(status)
        return logits

    def _check_slots(self, slots: Sequence[int], first: int, filled: int) -> None:
        count = self._slots
        if first < 0 or filled > self._positions or max(slots) >= count or min(slots) < 0:
            raise IndexError(
                f"positions {first} to {filled} of slots {list(slots)}, and there are "
                f"{self._positions} of {count}"
            )


class NativeSlots(CpuSlots):
    """Slots of a thinker or a talker in float32. Raises UnsuitedError."""

    def __init__(
        self,
        config: DecoderConfig,
        model: ThinkerModel | TalkerModel,
        slots: int,
        context_length: int,
        library: Library,
        threads: int = 1,
    ):
        super().__init__(config, slots, context_length, torch.float32)
        self.steps = NativeSteps(config, model, self._cache, library, threads)

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *extra: Tensor, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append rows to a slot's first `start`. extra: see NativeSteps.prefill."""
        self._drop(slot, start + len(rows))
        self._begin(slot, start)
        outputs = self.steps.prefill(slot, start, rows, positions, *extra)
        self._end(slot, start + len(rows), float(positions.max()))
        return outputs

    def prefill_ids(
        self,
        slot: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        *more: Any,
    ) -> Tensor:
        """Append rows of a table to a slot's first `start`."""
        self._drop(slot, start + positions.shape[1])
        self._begin(slot, start)
        logits = self.steps.prefill_ids(slot, start, ids, positions, *more)
        self._end(slot, start + positions.shape[1], float(positions.max()))
        return logits

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """See DecoderSlots.step."""
        table, hidden = table_of(rows, *rows.shape), empty_floats(self.slots, rows.shape[1])
        logits = self.step_ids(slots, range(len(slots)), table, None, hidden)
        return logits, hidden[list(slots)]

    def step_ids(self, slots: Sequence[int], ids: Sequence[int], *tables: Any) -> Tensor:
        """Append one row of a table to each slot; see NativeSteps.decode."""
        logits = self.steps.decode(slots, *self._ends(slots), ids, *tables)
        self._count_step(slots)
        return logits


class NativeThinkerSlots(NativeSlots):
    """The thinker's slots: one C call per step, and per prompt without media."""

    def __init__(self, config: DecoderConfig, thinker: ThinkerModel, *given: Any):
        super().__init__(config, thinker, *given)
        self._thinker, self._none_accepted = thinker, empty_floats(0, config.hidden_size)

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
        if not accepted.any():
            return self.prefill_ids(slot, token_ids, positions, start), self._none_accepted
        with torch.inference_mode():
            rows = media_rows(self._thinker, torch.from_numpy(token_ids), media)
            visual = () if media is None else (media.visual, media.deepstack)
            places = torch.from_numpy(positions)
            logits, states = self.prefill(slot, rows, places, *visual, start=start)
            return logits, states[torch.from_numpy(accepted)]

    def step_tokens(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See ThinkerSlots.step_tokens."""
        return self.step_ids(slots, token_ids)


def _check_visual(rows: Sequence[int], count: int) -> None:
    """Raise IndexError if rows don't ascend, or exceed a prompt of `count` rows."""
    if any(a >= b for a, b in pairwise((-1, *rows, count))):
        raise IndexError(f"vision fills ascending rows of the {count} of a prompt, got {rows}")
