"""Spoken prompts with random variation: voice, speed, pitch, pauses, noise and gain.

Training leaves out some speeds, pitches and noises for train/assess.py.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from train.espeak import VOICES, speak

RATE = 16000
_LONGEST_EDGE_S = 0.25  # silence before and after


@dataclass(frozen=True)
class Variation:
    """Ranges to draw from.

    speeds: words a minute; pitches: added to the voice's own; noises: exponents of the spectrum, 0
    is white, 2 is brown; below_db: the least and the most that noise is below the voice, in dB.
    """

    speeds: tuple[int, ...]
    pitches: tuple[int, ...]
    noises: tuple[float, ...]
    below_db: tuple[float, float]


TRAINING = Variation(
    speeds=(*range(120, 150), *range(160, 180), *range(190, 206)),
    pitches=(*range(-20, -12), *range(-8, 5), *range(9, 18)),
    noises=(0.0, 2.0),
    below_db=(15.0, 45.0),
)
# No speed, pitch or noise is also in TRAINING.
MEASURING = Variation(
    speeds=(*range(150, 160), *range(180, 190)),
    pitches=(*range(-12, -8), *range(5, 9)),
    noises=(1.0,),  # pink
    below_db=(18.0, 40.0),
)


def spoken_clip(words: str, variation: Variation, rng: random.Random) -> NDArray[np.float32]:
    """Speak `words` with random variation: float32 [samples] at 16 kHz."""
    voice = VOICES[rng.choice(sorted(VOICES))]
    voice = replace(
        voice,
        words_per_minute=rng.choice(variation.speeds),
        pitch=min(99, max(0, voice.pitch + rng.choice(variation.pitches))),
        pitch_range=rng.choice((20, 35, 50)),
        gap=rng.choice((0, 0, 2, 5, 12)),
    )
    speech = speak(words, voice, RATE)
    edges = [np.zeros(int(RATE * rng.uniform(0.02, _LONGEST_EDGE_S)), np.float32) for _ in "ab"]
    clip = np.concatenate((edges[0], speech, edges[1]))
    below = 10 ** (-rng.uniform(*variation.below_db) / 20)
    level = below * float(np.sqrt(np.mean(speech**2)))
    clip += level * _noise(len(clip), rng.choice(variation.noises), rng)
    gain = rng.uniform(0.2, 0.9) / float(np.max(np.abs(clip)))
    return (gain * clip).astype(np.float32)


def pink_noise(samples: int, rng: random.Random) -> NDArray[np.float32]:
    """Return noise of power 1 whose power falls with frequency."""
    return _noise(samples, 1.0, rng)


def _noise(samples: int, exponent: float, rng: random.Random) -> NDArray[np.float32]:
    """Return noise of power 1 whose power falls with frequency to this exponent."""
    source = np.random.default_rng(rng.getrandbits(32))
    spectrum = np.fft.rfft(source.standard_normal(samples))
    spectrum *= np.maximum(np.arange(len(spectrum)), 20) ** (-exponent / 2)
    noise = np.fft.irfft(spectrum, samples)
    return (noise / np.sqrt(np.mean(noise**2))).astype(np.float32)
