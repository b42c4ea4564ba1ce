"""The talker engine of all targets, over a target's decoder and code predictor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import DecoderSlots, Fault, Predictor, PredictorSampling
from qwen3_omni_neuron.engines.thinker import DecoderEngine
from qwen3_omni_neuron.errors import EngineError, PromptTooLongError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import lazy_zeros
from qwen3_omni_neuron.model.talker import codec_prefix_ids, media_mask, text_prefix_ids
from qwen3_omni_neuron.prompt.prompt import TalkerPrompt

ROWS_AT_ONCE = 4096  # rows per projection of TextRows.fill, which bounds its memory


class TalkerEngine(DecoderEngine):
    """A `Talker` over a decoder's slots, a code predictor, and tables of rows.

    codec_rows: the codec's table [codec vocab, hidden]. text_rows: returns rows [n, hidden] of text
    tokens int64 [n]; see TextRows. project_hidden: projects the accept layer's rows. newline_id:
    token of the line break after a role. release, fault: see DecoderEngine.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: DecoderSlots,
        predictor: Predictor,
        codec_rows: Tensor,
        text_rows: Callable[[Tensor], Tensor],
        project_hidden: Callable[[Tensor], Tensor],
        newline_id: int,
        release: Callable[[], None] = lambda: None,
        fault: Fault | None = None,
    ):
        super().__init__(decoder, release, fault)
        assert config.talker is not None
        self._codec_bos = config.talker.codec_bos_id
        self._config, self._decoder, self._predictor = config, decoder, predictor
        self._codec_rows, self.text_rows = codec_rows, text_rows
        self.project_hidden = project_hidden
        self._text_prefix = torch.tensor(text_prefix_ids(config, newline_id))
        self._incomplete: dict[int, _IncompletePrompt] = {}
        # By slot: the last step's hidden state, the code predictor's input, and the last frame's
        # feedback, the next step's input.
        self._hidden = codec_rows.new_zeros(self.slots, codec_rows.shape[1])
        self._feedback = torch.zeros_like(self._hidden)
        self._assistant_rows: dict[int, Tensor] = {}  # by speaker

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Drop a slot's rows, hidden state and feedback."""
        super().clear(slot)
        self._hidden[slot] = self._feedback[slot] = 0
        self._incomplete.pop(slot, None)

    @torch.inference_mode()
    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        """See Talker.prefill_chunk."""
        self._check_length(prompt)
        token_ids = prompt.token_ids[start:]
        if len(token_ids):
            media, rows = media_mask(token_ids, self._config), self.text_rows(token_ids)
            rows = self._with_media(rows, media, accepted)
            positions = prompt.positions[:, start : len(prompt.token_ids)]
            _, hidden = self._decoder.prefill(slot, rows, positions, start=start)
            if not hidden.isfinite().all():
                end = start + len(token_ids)
                raise EngineError.not_finite("talker", f"rows {start} to {end} of the prompt")

    @torch.inference_mode()
    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        """Fill a slot; keep the rows instead if media are missing. See Talker.prepare."""
        self._check_length(prompt)
        token_ids, positions = prompt.token_ids[start:], prompt.positions[:, start:]
        assistant = self._assistant(speaker_id)
        rows = torch.cat((self.text_rows(token_ids), assistant))
        media = media_mask(token_ids, self._config)
        if media.any():
            mask = F.pad(media, (0, len(assistant)))
            self._incomplete[slot] = _IncompletePrompt(rows, mask, positions, start)
        else:
            self._incomplete.pop(slot, None)
            self._fill(slot, rows, positions[:, :-1], start)

    @torch.inference_mode()
    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """See Talker.prefill."""
        codec_bos = self._codec_rows[self._codec_bos]
        prompt = self._incomplete.get(slot)
        if prompt is None:  # codec_bos replaces the last frame in later rows
            self._feedback[slot] = codec_bos
            return self.step((slot,), (first_token,))
        last = self.text_rows(torch.tensor([first_token])) + codec_bos
        rows = self._with_media(prompt.rows, prompt.media, accepted)
        logits = self._fill(slot, torch.cat((rows, last)), prompt.positions, prompt.start)
        del self._incomplete[slot]
        return logits

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        """See Talker.predict."""
        return self._predictor.predict(slots, code0, sampling, self._hidden, self._feedback)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """See Talker.step."""
        indices = list(slots)
        rows = self._feedback[indices] + self.text_rows(torch.tensor(token_ids))
        logits, self._hidden[indices] = self._decoder.step(slots, rows)
        return logits

    def rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return views of a slot's hidden state and feedback, [1, hidden] each."""
        return self._hidden[slot, None], self._feedback[slot, None]

    def set_rows(self, slot: int, hidden: Tensor, feedback: Tensor) -> None:
        """Replace a slot's hidden state and feedback, [1, hidden] each, for a comparison."""
        self._hidden[slot], self._feedback[slot] = hidden[0], feedback[0]

    def _check_length(self, prompt: TalkerPrompt) -> None:
        if len(prompt) >= self.context_length:
            raise PromptTooLongError(
                f"the talker's prompt has {len(prompt)} rows, but its KV cache has "
                f"{self.context_length} positions. Shorten the conversation."
            )

    def _with_media(self, rows: Tensor, media: Tensor, accepted: Tensor) -> Tensor:
        """Return rows with media rows filled in. media: bool [rows]."""
        count = int(media.sum())
        assert len(accepted) == count, f"{len(accepted)} accepted rows for {count} of media"
        if not count:
            return rows
        return rows.masked_scatter(media[:, None], self.project_hidden(accepted))

    def _fill(self, slot: int, rows: Tensor, positions: Tensor, start: int) -> Tensor:
        """Append rows to the first `start` of a slot; return the last row's logits [1, vocab]."""
        logits, (self._hidden[slot],) = self._decoder.prefill(slot, rows, positions, start=start)
        return logits

    def _assistant(self, speaker_id: int) -> Tensor:
        """Return the assistant rows 0 to 7: see model.talker."""
        rows = self._assistant_rows.get(speaker_id)
        if rows is None:
            assert self._config.talker is not None
            ids = codec_prefix_ids(self._config.talker, speaker_id)[:-1]
            rows = self.text_rows(self._text_prefix)
            rows[3:] += self._codec_rows[torch.tensor(ids)]
            self._assistant_rows[speaker_id] = rows
        return rows


class TextRows:
    """Rows of the text tokens [vocab, talker hidden], projected on first use.

    embedding: the thinker's table [vocab, thinker hidden]. project: the text projection. width: the
    talker's hidden size. Only projected rows use memory.
    """

    def __init__(
        self, embedding: Tensor, project: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype
    ):
        self._embedding, self._project = embedding, project
        self._rows = lazy_zeros((len(embedding), width), dtype)
        self._known, self._missing = np.zeros(len(embedding), dtype=bool), len(embedding)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows [n, talker hidden] of token ids int64 [n]."""
        return self.with_rows(token_ids.numpy()).index_select(0, token_ids)

    def with_rows(self, token_ids: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Return the table [vocab, talker hidden] with the rows of `token_ids` filled."""
        if self._missing:
            ids = np.asarray(token_ids)
            known = self._known[ids]
            if not known.all():
                self._fill(torch.from_numpy(np.unique(ids[~known])))
        return self._rows

    @torch.inference_mode()
    def fill(self) -> "TextRows":
        """Project all rows, so that no frame waits for one. Returns itself."""
        for ids in torch.from_numpy((~self._known).nonzero()[0]).split(ROWS_AT_ONCE):
            self._fill(ids)
        return self

    def _fill(self, token_ids: Tensor) -> None:
        rows = self._embedding.index_select(0, token_ids).to(self._rows.dtype)
        self._rows[token_ids] = self._project(rows)
        self._known[token_ids.numpy()] = True
        self._missing -= len(token_ids)


@dataclass(frozen=True)
class _IncompletePrompt:
    """Talker prompt without the thinker's hidden states of media.

    rows: [rows, hidden] from `start` on, without the last row; media rows are not yet filled.
    media: bool [rows]. positions: float32 [3, rows + 1]. start: rows already in the slot.
    """

    rows: Tensor
    media: Tensor
    positions: Tensor
    start: int
