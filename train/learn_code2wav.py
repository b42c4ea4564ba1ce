"""Training step 1: code2wav learns the audio of every word's frames."""

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.audio_loss import audio_losses
from train.codes import FRAME_SAMPLES, SpokenWord, reply
from train.fit import Losses, device, fit

STEPS = 2000
LEARNING_RATE = 2e-3
BATCH = 3
FRAMES = 40  # 3.2 s: four words
LONG_SILENCE_SHARE = 0.1  # of words


def learn_code2wav(model: Any, words: dict[str, dict[str, SpokenWord]], folder: Path) -> None:
    """Train model.code2wav on replies of random words.

    It starts from transformers' own initial weights, whose output is silent: from louder ones
    training takes longer.
    """
    torch.manual_seed(0)
    model.code2wav = type(model.code2wav)._from_config(model.code2wav.config).float().to(device())

    def losses_of(step: int) -> Losses:
        codes, wanted = _batch(words, random.Random(step))
        with torch.autocast(device().type, torch.bfloat16):
            made = model.code2wav(codes.to(device())).squeeze(1).float()
        return audio_losses(made, wanted[:, : made.shape[1]].to(device()))

    fit("code2wav", model.code2wav, losses_of, STEPS, LEARNING_RATE, folder)


def _batch(words: dict[str, dict[str, SpokenWord]], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Draw codes int64 [B, 16, frames] and samples [B, 1920 * frames], each row in one voice."""
    codes, samples = [], []
    for _ in range(BATCH):
        voice = words[rng.choice(sorted(words))]
        spoken = reply([_word(voice[rng.choice(sorted(voice))], rng) for _ in range(FRAMES // 4)])
        codes.append(spoken.codes[:FRAMES].T)
        samples.append(spoken.samples[: FRAMES * FRAME_SAMPLES])
    return torch.stack(codes), torch.stack(samples)


def _word(word: SpokenWord, rng: random.Random) -> SpokenWord:
    """Return a word whose silence now and then lasts: its last frame is repeated."""
    more = rng.randrange(1, FRAMES) if rng.random() < LONG_SILENCE_SHARE else 0
    codes = torch.cat((word.codes, word.codes[-1:].expand(more, -1)))
    return SpokenWord(codes, F.pad(word.samples, (0, more * FRAME_SAMPLES)))
