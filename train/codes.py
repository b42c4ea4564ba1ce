"""The training codec: the 16 codes of each frame of each word in each voice.

Nothing is learned here. Code 0 identifies the word and its frame in every voice; the other 15 are
drawn once for each word, frame and voice. So the talker chooses the words, the code predictor
infers the voice from the talker's hidden state, and code2wav learns the audio.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.events import SAMPLE_RATE
from testing.tiny.sizes import SIZES
from train.espeak import VOICES, speak
from train.vocabulary import SPOKEN

FRAME_SAMPLES = 1920
GROUPS = 16
CODEBOOK = SIZES["speaking"]["code2wav_config"]["codebook_size"]
MOST_FRAMES = 9  # of one word; 25 words of 9 frames and the pause fit in one codebook
PAUSE_FRAMES = 2  # after every word, including the last one
LOUDNESS = 0.1  # RMS of every word
_LEAD = 240  # samples of silence before a word, which keep its onset


@dataclass(frozen=True)
class SpokenWord:
    """One word in one voice, with the pause after it.

    codes: int64 [frames, 16]; samples: float32 [1920 * frames], code2wav's target.
    """

    codes: torch.Tensor
    samples: torch.Tensor


def spoken_words() -> dict[str, dict[str, SpokenWord]]:
    """Return every word of the vocabulary by speaker and word, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return {
        speaker: {
            word: _spoken_word(speak(word, voice, SAMPLE_RATE), index, generator)
            for index, word in enumerate(SPOKEN)
        }
        for speaker, voice in VOICES.items()
    }


def reply(words: list[SpokenWord]) -> SpokenWord:
    """Concatenate words."""
    return SpokenWord(
        torch.cat([word.codes for word in words]), torch.cat([word.samples for word in words])
    )


def _spoken_word(speech: NDArray[np.float32], index: int, generator: torch.Generator) -> SpokenWord:
    frames = -(-(_LEAD + len(speech)) // FRAME_SAMPLES)
    if frames > MOST_FRAMES:
        raise ValueError(f"a word takes {frames} frames, the codebook has {MOST_FRAMES} for each.")
    samples = np.zeros((frames + PAUSE_FRAMES) * FRAME_SAMPLES, np.float32)
    samples[_LEAD : _LEAD + len(speech)] = speech * (LOUDNESS / np.sqrt(np.mean(speech**2)))
    codes = torch.randint(CODEBOOK, (frames + PAUSE_FRAMES, GROUPS), generator=generator)
    codes[:frames, 0] = index * MOST_FRAMES + torch.arange(frames)
    codes[frames:, 0] = len(SPOKEN) * MOST_FRAMES + torch.arange(PAUSE_FRAMES)
    return SpokenWord(codes, torch.from_numpy(samples))
