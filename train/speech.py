"""Spoken prompts with random variation: voice, speed, pitch, pauses, noise and gain.

Training leaves out some speeds, pitches and noises for train/assess.py.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import soxr
from numpy.typing import NDArray

from train.espeak import VOICES, speak

RATE = 16000
_MU = 255  # of G.711's mu-law


@dataclass(frozen=True)
class Variation:
    """Ranges to draw from.

    speeds: words a minute; pitches: added to the voice's own; noises: exponents of the spectrum, 0
    is white, 2 is brown; below_db: the least and the most that noise is below the voice, in dB.
    edges_s: of which one is the most silence before and after; peaks: the least and the largest;
    telephone: the share of clips whose sound is band-limited, half of those in mu-law, too.
    """

    speeds: tuple[int, ...]
    pitches: tuple[int, ...]
    noises: tuple[float, ...]
    below_db: tuple[float, float]
    edges_s: tuple[float, ...] = (0.25,)
    peaks: tuple[float, float] = (0.2, 0.9)
    telephone: float = 0.0


TRAINING = Variation(
    speeds=(*range(120, 150), *range(160, 180), *range(190, 206)),
    pitches=(*range(-20, -12), *range(-8, 5), *range(9, 18)),
    noises=(0.0, 2.0),
    below_db=(15.0, 45.0),
    edges_s=(0.25, 0.25, 1.1),
    peaks=(0.012, 0.95),
    telephone=0.35,
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
    lengths = [int(RATE * rng.uniform(0.02, rng.choice(variation.edges_s))) for _ in "ab"]
    edges = [np.zeros(length, np.float32) for length in lengths]
    clip = np.concatenate((edges[0], speech, edges[1]))
    below = 10 ** (-rng.uniform(*variation.below_db) / 20)
    level = below * float(np.sqrt(np.mean(speech**2)))
    clip += level * _noise(len(clip), rng.choice(variation.noises), rng)
    least, most = np.log(variation.peaks)
    clip *= np.exp(rng.uniform(least, most)) / float(np.max(np.abs(clip)))
    if rng.random() < variation.telephone:
        clip = by_telephone(clip, rng.choice((6800, 8000)), mu_law=rng.random() < 0.5)
    return clip.astype(np.float32)


def wordless_clip(rng: random.Random) -> NDArray[np.float32]:
    """Return silence or noise, up to three seconds: float32 [samples] at 16 kHz."""
    level = rng.choice((0.0, np.exp(rng.uniform(np.log(0.001), np.log(0.3)))))
    samples = int(RATE * rng.uniform(0.3, 3.0))
    return np.clip(level * _noise(samples, rng.uniform(0.0, 2.0), rng), -1, 1).astype(np.float32)


def by_telephone(
    clip: NDArray[np.float32], rate: int, *, mu_law: bool = False
) -> NDArray[np.float32]:
    """Return the clip as a line of this sampling rate carries it."""
    narrow = soxr.resample(clip, RATE, rate)
    if mu_law:
        codes = np.round(127 * np.sign(narrow) * np.log1p(_MU * np.abs(narrow)) / np.log1p(_MU))
        narrow = np.sign(codes) * np.expm1(np.abs(codes) / 127 * np.log1p(_MU)) / _MU
    wide = soxr.resample(narrow.astype(np.float32), rate, RATE)
    return np.pad(wide, (0, max(0, len(clip) - len(wide))))[: len(clip)]


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
