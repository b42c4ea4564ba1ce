"""How a prompt sounds when a person says it: any speaker's voice, at some speed and pitch, with
pauses, noise and gain. Training leaves out some speeds, pitches and noises, for `assess.py`."""

import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from train.espeak import VOICES, speak

RATE = 16000
_LONGEST_EDGE_S = 0.25  # silence before and after


@dataclass(frozen=True)
class Surroundings:
    """What a voice may do. speeds: words a minute; pitches: further than the voice's own;
    noises: exponents of the spectrum, 0 is white, 2 is brown; below_db: between which loudnesses
    the noise is, in dB below the voice."""

    speeds: tuple[int, ...]
    pitches: tuple[int, ...]
    noises: tuple[float, ...]
    below_db: tuple[float, float]


TRAINING = Surroundings(
    speeds=(*range(120, 150), *range(160, 180), *range(190, 206)),
    pitches=(*range(-20, -12), *range(-8, 5), *range(9, 18)),
    noises=(0.0, 2.0),
    below_db=(15.0, 45.0),
)
# None of its speeds, pitches and noises is among the above.
MEASURING = Surroundings(
    speeds=(*range(150, 160), *range(180, 190)),
    pitches=(*range(-12, -8), *range(5, 9)),
    noises=(1.0,),  # pink
    below_db=(18.0, 40.0),
)


def heard(words: str, around: Surroundings, rng: random.Random) -> NDArray[np.float32]:
    """`words` said somehow: float32 [samples] at 16 kHz."""
    voice = VOICES[rng.choice(sorted(VOICES))]
    voice = replace(
        voice,
        words_per_minute=rng.choice(around.speeds),
        pitch=min(99, max(0, voice.pitch + rng.choice(around.pitches))),
        pitch_range=rng.choice((20, 35, 50)),
        gap=rng.choice((0, 0, 2, 5, 12)),
    )
    said = speak(words, voice, RATE)
    edges = [np.zeros(int(RATE * rng.uniform(0.02, _LONGEST_EDGE_S)), np.float32) for _ in "ab"]
    sound = np.concatenate((edges[0], said, edges[1]))
    below = 10 ** (-rng.uniform(*around.below_db) / 20)
    level = below * float(np.sqrt(np.mean(said**2)))
    sound += level * _noise(len(sound), rng.choice(around.noises), rng)
    gain = rng.uniform(0.2, 0.9) / float(np.max(np.abs(sound)))
    return (gain * sound).astype(np.float32)


def _noise(samples: int, exponent: float, rng: random.Random) -> NDArray[np.float32]:
    """Noise of power 1 whose power falls with frequency to this exponent."""
    source = np.random.default_rng(rng.getrandbits(32))
    spectrum = np.fft.rfft(source.standard_normal(samples))
    spectrum *= np.maximum(np.arange(len(spectrum)), 20) ** (-exponent / 2)
    noise = np.fft.irfft(spectrum, samples)
    return (noise / np.sqrt(np.mean(noise**2))).astype(np.float32)
