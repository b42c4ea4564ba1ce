"""Batches of conversations for the thinker's training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.fit import device
from train.questions import Question

IGNORED = -100  # a label without a loss


@dataclass(frozen=True)
class Batch:
    """A batch.

    token_ids: int64 [B, S], prompt and reply, padded at the end; labels: int64 [B, S], the next
    token where it is the reply's, else IGNORED. mels: float32 [mel_bins, frames] of each clip;
    clip_words: the words of each.
    """

    token_ids: Tensor
    labels: Tensor
    mels: tuple[Tensor, ...]
    clip_words: tuple[str, ...]

    def on_device(self) -> "Batch":
        """Return it with the token ids and labels on the device of training."""
        token_ids, labels = self.token_ids.to(device()), self.labels.to(device())
        return replace(self, token_ids=token_ids, labels=labels)


def batch_of(
    questions: Sequence[Question], prompt_builder: PromptBuilder, tokenizer: Any, im_end_id: int
) -> Batch:
    """Make a batch of conversations with their replies."""
    rows, labels = [], []
    mels: list[Tensor] = []
    for question in questions:
        prompt = question.inputs(prompt_builder)
        reply = torch.tensor([*tokenizer.encode(question.reply), im_end_id])
        rows.append(torch.cat((prompt.token_ids, reply[:-1])))
        unasked = torch.full((len(prompt) - 1,), IGNORED)
        labels.append(torch.cat((unasked, reply)))
        mels.extend(prompt.audio_mel)
    return Batch(
        nn.utils.rnn.pad_sequence(rows, batch_first=True),
        nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        tuple(mels),
        tuple(q.prompt.words for q in questions if q.spoken),
    )


def encoded_audio(model: Any, mels: Sequence[Tensor]) -> Tensor:
    """Encode the clips; return their rows, concatenated: float32 [tokens, hidden]."""
    tower = model.thinker.model.audio_tower
    lengths = torch.tensor([mel.shape[1] for mel in mels], device=device())
    mel = torch.cat(list(mels), dim=1).to(device())
    return tower(mel, feature_lens=lengths, return_dict=True).last_hidden_state


def embedded(model: Any, token_ids: Tensor, audio: Tensor | None) -> Tensor:
    """Return float32 [B, S, hidden]: embeddings of text tokens, encoder rows of audio tokens."""
    rows = model.thinker.get_input_embeddings()(token_ids)
    if audio is None:
        return rows
    is_audio = token_ids == model.config.thinker_config.audio_token_id
    return rows.masked_scatter(is_audio[..., None], audio)
