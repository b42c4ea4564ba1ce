"""Talker: the rows of its prompt, and its decoder, which computes code 0's logits."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.decoder import DECODE, PROMPT, Decoder
from qwen3_omni_neuron.model.kv_cache import Appendable
from qwen3_omni_neuron.model.rotary import Rotary


class ResizeMlp(nn.Module):
    """Projection from thinker width to talker width.

    Source: transformers Qwen3OmniMoeTalkerResizeMLP.forward.
    """

    def __init__(self, c: TalkerConfig):
        super().__init__()
        self.fc1 = nn.Linear(c.thinker_hidden_size, c.projection_width)
        self.fc2 = nn.Linear(c.projection_width, c.text.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, thinker hidden] to [rows, talker hidden]."""
        return self.fc2(F.silu(self.fc1(x)))


def user_positions(token_ids: Tensor, config: OmniConfig) -> Tensor:
    """Return the indices, int64, of the prompt tokens in user segments.

    token_ids: int64 [S]. A segment runs from <|im_start|> to the next; the token after is its role.
    """
    ids = token_ids.numpy()  # numpy, not torch: see prompt.prompt
    (starts,) = (ids == config.im_start_id).nonzero()
    if not len(starts):
        return torch.from_numpy(starts)
    segment = starts.searchsorted(np.arange(len(ids)), side="right") - 1
    roles = ids[(starts + 1).clip(max=len(ids) - 1)]
    in_user = (segment >= 0) & (roles[segment.clip(min=0)] == config.user_id)
    return torch.from_numpy(in_user.nonzero()[0])


def media_mask(token_ids: Tensor, config: OmniConfig) -> Tensor:
    """Return where the thinker's input is encoded media, bool [S]. token_ids: int64 [S]."""
    return torch.isin(token_ids, torch.tensor(config.thinker.media_token_ids))


def codec_prefix_ids(config: TalkerConfig, speaker_id: int) -> tuple[int, ...]:
    """Return the codec ids of assistant rows 3 to 8."""
    return (
        config.codec_nothink_id,
        config.codec_think_bos_id,
        config.codec_think_eos_id,
        speaker_id,
        config.codec_pad_id,
        config.codec_bos_id,
    )


def text_prefix_ids(config: OmniConfig, newline_id: int) -> tuple[int, ...]:
    """Return the text ids of assistant rows 0 to 7; row 8 has the first generated token."""
    opening = (config.im_start_id, config.assistant_id, newline_id)
    return (*opening, *(config.tts_pad_id,) * 4, config.tts_bos_id)


class TalkerModel(nn.Module):
    """Decoder of 20 MoE layers (released) with the gated shared expert.

    Source: transformers Qwen3OmniMoeTalkerForConditionalGeneration.forward.
    """

    def __init__(self, c: TalkerConfig):
        super().__init__()
        text = c.text
        self.codec_embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        self.decoder = Decoder(text)
        self.rotary = Rotary(text.rope, text.head_dim)
        self.codec_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    def prefill(
        self, rows: Tensor, positions: Tensor, last: Tensor, cache: Appendable
    ) -> tuple[Tensor, Tensor]:
        """Run one prompt, or its rows after the cached ones.

        rows: [S, hidden]; positions: float32 [3, S]; last: int64 [1], index of the last row before
        padding; cache: one slot's. Returns codec logits [1, vocab] and the last row's post-norm
        hidden state [1, hidden], the code predictor's first input.
        """
        rotation = self.rotary.at_axes(positions)
        x, _ = self.decoder(rows, rotation, cache, PROMPT)
        hidden = self.decoder.norm(x.index_select(0, last))
        return self.codec_head(hidden), hidden

    def decode(self, rows: Tensor, positions: Tensor, cache: Appendable) -> tuple[Tensor, Tensor]:
        """Run one frame a slot.

        rows: [slots, hidden], codec feedback plus text row; positions: float32 [slots]. Returns
        codec logits [slots, vocab] and post-norm hidden states [slots, hidden].
        """
        x, _ = self.decoder(rows, self.rotary.at(positions), cache, DECODE)
        hidden = self.decoder.norm(x)
        return self.codec_head(hidden), hidden
