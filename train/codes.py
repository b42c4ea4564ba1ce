"""The training codec: the 16 codes of each frame of each word in each voice.

Nothing is learned here. Code 0 identifies the word and its frame in every voice; the other 15 are
drawn once for each word, frame and voice. So the talker chooses the words, the code predictor
infers the voice from the talker's hidden state, and code2wav learns the audio.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3_omni_neuron.events import SAMPLE_RATE
from testing.tiny.sizes import SIZES
from train.espeak import VOICES, speak_word
from train.vocabulary import SPOKEN

FRAME_SAMPLES = 1920
GROUPS = 16
CODEBOOK = SIZES["speaking"]["code2wav_config"]["codebook_size"]
PAUSE_FRAMES = 2  # after every word, including the last one
LOUDNESS = 0.1  # RMS of every word
_FIRST = 25  # words whose codes are drawn first: the weights that ship began with only these
_LEAD = 240  # samples of silence before a word, which keep its onset


@dataclass(frozen=True)
class SpokenWord:
    """One word in one voice, with the pause after it.

    codes: int64 [frames, 16]; samples: float32 [1920 * frames], code2wav's target.
    """

    codes: torch.Tensor
    samples: torch.Tensor


@lru_cache(maxsize=1)  # a second call would draw other codes: espeak-ng goes on with its phase
def spoken_words() -> dict[str, dict[str, SpokenWord]]:
    """Return every word of the vocabulary by speaker and word, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    speech = {
        speaker: {word: speak_word(word, voice, SAMPLE_RATE) for word in SPOKEN}
        for speaker, voice in VOICES.items()
    }
    first, names = PAUSE_FRAMES, dict[str, int]()
    for word in SPOKEN:
        names[word] = first
        first += max(_frames(spoken[word]) for spoken in speech.values())
    if first > CODEBOOK:
        raise ValueError(f"the words take {first} of {CODEBOOK} codes.")
    made: dict[str, dict[str, SpokenWord]] = {speaker: {} for speaker in VOICES}
    for words in (SPOKEN[:_FIRST], SPOKEN[_FIRST:]):
        for speaker, spoken in speech.items():
            for word in words:
                made[speaker][word] = _spoken_word(spoken[word], names[word], generator)
    return made


def reply(words: list[SpokenWord]) -> SpokenWord:
    """Concatenate words."""
    return SpokenWord(
        torch.cat([word.codes for word in words]), torch.cat([word.samples for word in words])
    )


def _frames(speech: NDArray[np.float32]) -> int:
    return -(-(_LEAD + len(speech)) // FRAME_SAMPLES)


def _spoken_word(speech: NDArray[np.float32], first: int, generator: torch.Generator) -> SpokenWord:
    """Return a word whose frames have code 0 from `first` on; those of the pause are 0 and 1."""
    frames = _frames(speech)
    samples = np.zeros((frames + PAUSE_FRAMES) * FRAME_SAMPLES, np.float32)
    samples[_LEAD : _LEAD + len(speech)] = speech * (LOUDNESS / np.sqrt(np.mean(speech**2)))
    codes = torch.randint(CODEBOOK, (frames + PAUSE_FRAMES, GROUPS), generator=generator)
    codes[:frames, 0] = first + torch.arange(frames)
    codes[frames:, 0] = torch.arange(PAUSE_FRAMES)
    return SpokenWord(codes, torch.from_numpy(samples))
