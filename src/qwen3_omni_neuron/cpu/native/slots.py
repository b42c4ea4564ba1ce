"""Slots whose rows the library computes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class NativeSlots(Slots):
    """Slots of a thinker or a talker, computed in float32; model: has the packed weights.

    dtype: one of cpu.native.steps.KV_DTYPES. threads: limit of a call. Otherwise as Slots. Raises
    UnsuitedError; see NativeSteps.
    """

    def __init__(
        self,
        config: DecoderConfig,
        model: Thinker | Talker,
        slots: int,
        context_length: int,
        library: Library,
        threads: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(config, slots, context_length, dtype)
        self.steps = NativeSteps(config, model, self._cache, library, threads)

    def prefill_ids(
        self,
        slot: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.float32],
        start: int,
        *more: Any,
    ) -> Tensor:
        """Append rows of a table after a slot's first `start`: see NativeSteps.prefill_ids.

        Otherwise like `prefill`.
        """
        self._begin(slot, start)
        logits = self.steps.prefill_ids(slot, start, ids, positions, *more)
        self._end(slot, start + positions.shape[1], float(positions.max()))
        return logits

    def step_ids(self, slots: Sequence[int], ids: Sequence[int], *tables: Any) -> Tensor:
        """Append one row of a table to each slot; see NativeSteps.decode."""
        logits = self.steps.decode(slots, *self._ends(slots), ids, *tables)
        self._count_step(slots)
        return logits

    def _append(
        self, slot: int, start: int, rows: Tensor, positions: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.steps.prefill(slot, start, rows, positions, *extra)
