"""The talker engine in C."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import table_of
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.steps import NativeSlots
from qwen3_omni_neuron.engines.talker import TalkerEngine, TextRows
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.prompt import TalkerPrompt


class NativeTalker(TalkerEngine):
    """TalkerEngine over float32 rows, with one C call per prompt, step and frame.

    Torch operations release the interpreter lock, for which stages compete: with a small model that
    took longer than the arithmetic.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: NativeSlots,
        predictor: NativePredictor,
        codec_rows: Tensor,
        text_rows: TextRows,
        project_hidden: Callable[[Tensor], Tensor],
        newline_id: int,
    ):
        assert codec_rows.dtype == torch.float32
        super().__init__(
            config, decoder, predictor, codec_rows, text_rows, project_hidden, newline_id
        )
        self._slots, self._rows_of = decoder, text_rows.with_rows
        self._codec_bos_row = codec_rows[self._codec_bos].numpy()

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        """Fill a slot; keep the rows instead if media are missing."""
        ids = prompt.token_ids.numpy()[start:]
        if np.isin(ids, self._config.thinker.media_token_ids).any():
            return super().prepare(slot, prompt, speaker_id, start)
        self._check_length(prompt)
        self._incomplete.pop(slot, None)
        rows, positions = self._rows_of(ids), prompt.positions.numpy()[:, start:-1]
        more = table_of(rows, *rows.shape), self._assistant(speaker_id), False
        self._slots.prefill_ids(slot, ids, positions, start, *more)
        return None

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """See Talker.prefill."""
        if slot in self._incomplete:
            return super().prefill(slot, accepted, first_token)
        self._feedback.numpy()[slot] = self._codec_bos_row
        return self.step((slot,), (first_token,))

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See Talker.step."""
        rows = self._rows_of(token_ids)
        table = table_of(rows, *rows.shape)
        return self._slots.step_ids(slots, token_ids, table, self._feedback, self._hidden)
