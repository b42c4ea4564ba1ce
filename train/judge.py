"""Recognition of words and voices that does not use our models.

Speech is compared with espeak-ng's renderings of every word in every voice: MFCCs, and dynamic time
warping between them, both librosa's. Words are separated by the silence between them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.events import SAMPLE_RATE
from train.espeak import VOICES, speak_word
from train.vocabulary import SPOKEN

RATE = SAMPLE_RATE
_HOP = 240  # 10 ms
_SILENCE_DB = 35  # below the loudest
_GAP_S = 0.12  # silence between two words; a stop consonant's is shorter
_SHORTEST_S = 0.08


@dataclass(frozen=True)
class RecognisedWord:
    """A recognised word.

    distance: to the nearest rendering, 0 for itself; pace: its length over that rendering's.
    """

    word: str
    speaker: str
    distance: float
    pace: float


class Judge:
    """Recogniser of every word of the vocabulary in every voice."""

    def __init__(self) -> None:
        self._renderings = [
            (word, speaker, _features(speak_word(word, voice, RATE)))
            for speaker, voice in VOICES.items()
            for word in SPOKEN
        ]

    def hear(self, samples: NDArray[np.float32]) -> list[RecognisedWord]:
        """Recognise every word, in order. samples: float32 [samples] at 24 kHz."""
        return [self._nearest(samples[a:b]) for a, b in word_bounds(samples)]

    def _nearest(self, sound: NDArray[np.float32]) -> RecognisedWord:
        features = _features(sound)
        distance, word, speaker, length = min(
            (_distance(features, known), word, speaker, known.shape[1])
            for word, speaker, known in self._renderings
        )
        return RecognisedWord(word, speaker, distance, features.shape[1] / length)


def word_bounds(samples: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Return the first sample of each word, and the one after its last: the parts between silences.

    samples: float32 [samples] at 24 kHz.
    """
    from librosa.effects import split  # here and below: takes seconds

    parts = split(samples, top_db=_SILENCE_DB, ref=_loudest, frame_length=4 * _HOP, hop_length=_HOP)
    words: list[tuple[int, int]] = []
    for start, end in parts.tolist():
        if words and start - words[-1][1] < _GAP_S * RATE:
            words[-1] = words[-1][0], end
        else:
            words.append((start, end))
    return [(a, b) for a, b in words if b - a >= _SHORTEST_S * RATE]


def _loudest(values: NDArray[np.float32]) -> float:
    """Return the maximum, at least 0.05 of full scale, so that silence has no words."""
    return max(float(np.max(values)), 0.05)


def _features(sound: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 [16, frames]: MFCCs without the first, which is loudness."""
    from librosa.feature import mfcc

    features = mfcc(
        y=sound, sr=RATE, n_mfcc=17, n_fft=4 * _HOP, hop_length=_HOP, n_mels=64, lifter=22
    )[1:]
    return features / 50


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the cost per step of the cheapest alignment."""
    from librosa.sequence import dtw

    costs, path = dtw(a, b)
    return float(costs[-1, -1]) / len(path)
