"""The codec of this world: which 16 codes stand for each 80 ms of each word in each voice.

Nothing is learned here. Code 0 names the word and the frame of it, whoever speaks; the other 15
are drawn once for each word, frame and voice. So the talker decides what is said, the code
predictor needs the talker's hidden state for whose voice it is, and code2wav learns the sound.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.tiny.shapes import CODE_GROUPS
from train.espeak import VOICES, speak
from train.shape import SHAPE
from train.world import SPOKEN

FRAME_SAMPLES = 1920
GROUPS = CODE_GROUPS
CODEBOOK = SHAPE.codebook_size
MOST_FRAMES = 9  # of one word; 25 words of 9 frames, and the pause, fit into one codebook
PAUSE_FRAMES = 2  # after every word, the last one too
LOUDNESS = 0.1  # RMS of every word
_LEAD = 240  # samples of silence before a word: its first sound is not cut


@dataclass(frozen=True)
class SpokenWord:
    """One word in one voice, the pause behind it included.

    codes: int64 [frames, 16]; samples: float32 [1920 * frames], what code2wav learns to make.
    """

    codes: torch.Tensor
    samples: torch.Tensor


def spoken_words() -> dict[str, dict[str, SpokenWord]]:
    """Every word of the world by speaker and word. The same each time."""
    generator = torch.Generator().manual_seed(0)
    return {
        speaker: {
            word: _spoken_word(speak(word, voice, SAMPLE_RATE), index, generator)
            for index, word in enumerate(SPOKEN)
        }
        for speaker, voice in VOICES.items()
    }


def reply(words: list[SpokenWord]) -> SpokenWord:
    """Words one after the other."""
    return SpokenWord(
        torch.cat([word.codes for word in words]), torch.cat([word.samples for word in words])
    )


def _spoken_word(sound: NDArray[np.float32], index: int, generator: torch.Generator) -> SpokenWord:
    frames = -(-(_LEAD + len(sound)) // FRAME_SAMPLES)
    if frames > MOST_FRAMES:
        raise ValueError(f"a word takes {frames} frames, the codebook has {MOST_FRAMES} for each.")
    samples = np.zeros((frames + PAUSE_FRAMES) * FRAME_SAMPLES, np.float32)
    samples[_LEAD : _LEAD + len(sound)] = sound * (LOUDNESS / np.sqrt(np.mean(sound**2)))
    codes = torch.randint(CODEBOOK, (frames + PAUSE_FRAMES, GROUPS), generator=generator)
    codes[:frames, 0] = index * MOST_FRAMES + torch.arange(frames)
    codes[frames:, 0] = len(SPOKEN) * MOST_FRAMES + torch.arange(PAUSE_FRAMES)
    return SpokenWord(codes, torch.from_numpy(samples))
