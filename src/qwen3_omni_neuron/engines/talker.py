"""The talker with its code predictor, over what a target runs of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import TalkerPrompt
from qwen3_omni_neuron.engines.protocols import DecoderSlots, Numbers, Predictor, PredictorSampling
from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker_prompt import codec_prefix_ids, media_mask, text_prefix_ids


@dataclass(frozen=True)
class _Awaited:
    """A talker prompt that lacks what the thinker makes of the media.

    rows: [rows, hidden], the media ones not filled yet, and the last one missing. media: bool
    [rows], which those are. positions: float32 [3, rows + 1].
    """

    rows: Tensor
    media: Tensor
    positions: Tensor


class TalkerEngine:
    """Serves runtime.protocols.Talker over a decoder's slots, a code predictor and the projections.

    decoder: takes rows, gives logits and post-norm hidden states. codec_rows: the codec's table
    [codec vocab, hidden]. text_rows: [vocab, hidden], see text_rows. project_hidden: the accept
    layer's rows to the talker's. newline_id: the token of the line break after a role. release:
    gives back what the parts hold beside memory.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: DecoderSlots,
        predictor: Predictor,
        codec_rows: Tensor,
        text_rows: Tensor,
        project_hidden: Callable[[Tensor], Tensor],
        newline_id: int,
        release: Callable[[], None] = lambda: None,
    ):
        assert config.talker is not None
        self._codec_bos = config.talker.codec_bos_id
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self._config, self._decoder, self._predictor = config, decoder, predictor
        self._codec_rows, self._text_rows = codec_rows, text_rows
        self._project_hidden, self._release = project_hidden, release
        self._text_prefix = torch.tensor(text_prefix_ids(config, newline_id))
        self._number = Numbers(config.talker.text.vocab_size)
        self._awaited: dict[int, _Awaited] = {}
        row = codec_rows[:1]
        # Of the last step: the code predictor starts from it.
        self._hidden = [row] * self.slots
        # Of the last frame: the next step starts from it.
        self._feedback = [row] * self.slots

    @torch.inference_mode()
    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int) -> None:
        if len(prompt) >= self.context_length:
            raise PromptTooLongError(
                f"the talker's prompt has {len(prompt)} rows and its KV cache "
                f"{self.context_length} positions. Shorten the conversation."
            )
        assistant = self._text_rows[self._text_prefix]
        assistant[3:] += self._codec_prefix(speaker_id)[:-1]
        rows = torch.cat((self._text_rows[prompt.token_ids], assistant))
        media = media_mask(prompt.token_ids, self._config)
        if media.any():
            mask = F.pad(media, (0, len(assistant)))
            self._awaited[slot] = _Awaited(rows, mask, prompt.positions)
        else:
            self._awaited.pop(slot, None)
            self._fill(slot, rows, prompt.positions[:, :-1])

    @torch.inference_mode()
    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        codec_bos = self._codec_rows[self._codec_bos]
        last = self._text_rows[first_token : first_token + 1] + codec_bos
        awaited = self._awaited.pop(slot, None)
        if awaited is None:
            return self._advance((slot,), last)
        rows = awaited.rows.masked_scatter(awaited.media[:, None], self._project_hidden(accepted))
        return self._fill(slot, torch.cat((rows, last)), awaited.positions)

    @torch.inference_mode()
    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        if len(slots) == 1:
            slot, code = slots[0], self._number(code0[0])
            codes, self._feedback[slot] = self._predictor.predict(
                self._hidden[slot], code, sampling
            )
            return codes
        hidden = torch.cat([self._hidden[slot] for slot in slots])
        codes, feedback = self._predictor.predict(hidden, torch.tensor(code0), sampling)
        for slot, row in zip(slots, feedback.split(1), strict=True):
            self._feedback[slot] = row
        return codes

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        if len(slots) == 1:
            token = token_ids[0]
            return self._advance(slots, self._feedback[slots[0]] + self._text_rows[token])
        feedback = torch.cat([self._feedback[slot] for slot in slots])
        text = self._text_rows.index_select(0, torch.tensor(token_ids))
        return self._advance(slots, feedback + text)

    def close(self) -> None:
        self._release()

    def _fill(self, slot: int, rows: Tensor, positions: Tensor) -> Tensor:
        """Prefill a slot. Returns the last row's logits [1, vocab]."""
        logits, self._hidden[slot] = self._decoder.prefill(slot, rows, positions)
        return logits

    def _advance(self, slots: Sequence[int], rows: Tensor) -> Tensor:
        """Append one row a slot. Returns logits [len(slots), vocab]."""
        logits, hidden = self._decoder.step(slots, rows)
        for slot, row in zip(slots, hidden.split(1), strict=True):
            self._hidden[slot] = row
        return logits

    def _codec_prefix(self, speaker_id: int) -> Tensor:
        """Codec sides of the assistant rows 3 to 8."""
        assert self._config.talker is not None
        ids = codec_prefix_ids(self._config.talker, speaker_id)
        return self._codec_rows[torch.tensor(ids)]


ROWS_AT_ONCE = 4096  # bounds what the projection needs beside its result


@torch.inference_mode()
def text_row_table(embedding: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Talker rows [vocab, talker hidden] of all text tokens.

    embedding: the thinker's table [vocab, thinker hidden]. project: the text projection.
    """
    first = project(embedding[:ROWS_AT_ONCE])
    table = first.new_empty(len(embedding), first.shape[1])
    table[:ROWS_AT_ONCE] = first
    for start in range(ROWS_AT_ONCE, len(embedding), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        table[start:stop] = project(embedding[start:stop])
    return table
