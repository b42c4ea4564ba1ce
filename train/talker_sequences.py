"""Talker sequences with their right codes, in the rows of generation.

    row       text side                        codec side                         predicts
    0..U-1    the user's segments              -                                  -
    U..U+8    the nine assistant rows          zeros, then the six prefix ids     the last: frame 0
    U+9+k     reply token k+1, tts_eos,        the 16 codes of frame k            frame k+1, or
              tts_pad                                                             codec_eos

Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.model.config import ASSISTANT_ROWS, OmniConfig
from qwen3_omni_neuron.model.talker import codec_prefix_ids, text_prefix_ids
from train.batches import IGNORED
from train.codes import CODEBOOK, GROUPS

NO_CODE = -1


@dataclass(frozen=True)
class UserRows:
    """The thinker's rows of a prompt's user segments.

    rows: float32 [U, thinker hidden]: hidden states of the accept layer where is_media, bool [U],
    embeddings elsewhere.
    """

    rows: Tensor
    is_media: Tensor


@dataclass(frozen=True)
class Talk:
    """One sequence of T rows.

    rows, is_media: the text side, before its projections. codes: int64 [T, 16], each row's input,
    NO_CODE for none. labels: int64 [T], the code 0 that each row predicts; frames: int64 [T, 16],
    its whole frame, NO_CODE where there is none. words: int64 [T, 2], the word of that frame and
    the next word, IGNORED where there is none.
    """

    rows: Tensor
    is_media: Tensor
    codes: Tensor
    labels: Tensor
    frames: Tensor
    words: Tensor


def talk(
    config: OmniConfig,
    embed: Any,
    user: UserRows,
    newline_id: int,
    reply_ids: Sequence[int],
    codes: Tensor,
    words: Tensor,
    speaker: str,
    second_eos: bool = False,
) -> Talk:
    """Make a sequence of a reply.

    embed: the thinker's embedding. reply_ids: without the end token. codes: int64 [N, 16], N may be
    0; words: int64 [N, 2], see Talk. second_eos: a second tts_eos follows the first, and the talker
    learns to stop there, so that a caller's wrong input is audible.
    """
    if second_eos:
        codes, words = codes[: len(reply_ids) + 1], words[: len(reply_ids) + 1]
    assert config.talker is not None
    frames = len(codes)
    later = [*reply_ids[1:], config.tts_eos_id][:frames]
    after = config.tts_eos_id if second_eos else config.tts_pad_id
    text = [*text_prefix_ids(config, newline_id), reply_ids[0], *later]
    text += [after] * (frames - len(later))
    rows = torch.cat((user.rows, embed(torch.tensor(text, device=user.rows.device))))
    first = len(user.rows) + ASSISTANT_ROWS  # the row of frame 0
    fed = torch.full((len(rows), GROUPS), NO_CODE)
    prefix = codec_prefix_ids(config.talker, config.talker.speaker_ids[speaker])
    fed[first - len(prefix) : first, 0] = torch.tensor(prefix)
    fed[first:] = codes
    made = torch.full_like(fed, NO_CODE)
    made[first - 1 : -1] = codes
    spoken = torch.full((len(rows), 2), IGNORED)
    spoken[first - 1 : -1] = words
    labels = torch.full((len(rows),), IGNORED)
    labels[first - 1 : -1] = codes[:, 0]
    labels[-1] = config.talker.codec_eos_id
    is_media = torch.cat((user.is_media, torch.zeros(len(text), dtype=torch.bool)))
    return Talk(rows, is_media, fed, labels, made, spoken)


def with_slips(codes: Tensor, share: float, rng: random.Random) -> Tensor:
    """Replace a share of the codes by random ones, so that one wrong sample causes no others."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    slips = torch.rand(codes.shape, generator=generator) < share
    slips &= (codes != NO_CODE) & (codes < CODEBOOK)
    return torch.where(slips, torch.randint(CODEBOOK, codes.shape, generator=generator), codes)
