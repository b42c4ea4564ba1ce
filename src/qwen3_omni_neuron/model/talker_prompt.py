r"""Talker prompt: which rows it has, and the projections that make them of the thinker's.

The prompt is every user segment (system and earlier assistant segments are skipped), then nine
assistant rows, each the sum of a text side and a codec side:

    row    text side          codec side
    0..2   im_start assistant \n    -
    3      tts_pad            nothink
    4      tts_pad            think_bos
    5      tts_pad            think_eos
    6      tts_pad            speaker
    7      tts_bos            codec_pad
    8      first token        codec_bos

So eight of the nine are known before the thinker has generated a token.
Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import OmniConfig, TalkerConfig


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

    token_ids: int64 [S]. A segment runs from <|im_start|> up to the next one; the token after
    <|im_start|> is its role.
    """
    ids = token_ids.numpy()  # numpy, not torch: see conversation.positions
    (starts,) = (ids == config.im_start_id).nonzero()
    if not len(starts):
        return torch.from_numpy(starts)
    segment = starts.searchsorted(np.arange(len(ids)), side="right") - 1
    roles = ids[(starts + 1).clip(max=len(ids) - 1)]
    in_user = (segment >= 0) & (roles[segment.clip(min=0)] == config.user_id)
    return torch.from_numpy(in_user.nonzero()[0])


def media_mask(token_ids: Tensor, config: OmniConfig) -> Tensor:
    """Return where the thinker's input is encoded media instead of a token, bool [S].

    token_ids: int64 [S].
    """
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
